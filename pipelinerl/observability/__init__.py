"""Reports of a role: its log, heartbeat, metrics, spans and archive.

Nothing here may stop a role: failures are only logged, and no caller waits for the network.
"""
