"""What a role tells the outside: its log, its heartbeat, its metrics.

Nothing here decides anything and nothing here may stop a role: a failing wandb or a full metrics queue is logged and
forgotten. Writing the log, the status file and the metrics never blocks the caller on the network.
"""
