"""Commands and functions that read a run's folder from outside, while the run is alive or after it has ended.

`status` shows which role waits for which, `ledger` the outcome of every rollout, `streams` the records, `report` the
summary. `reading` opens the streams, `replay` computes a step again. Nothing here changes a run.
"""
