"""What a role reports: its log, its heartbeat, its metrics.

Nothing here makes decisions for a role or may stop it. A failing wandb or a full metrics queue is only logged. Writing
the log, the status file and the metrics never blocks the caller on the network.
"""
