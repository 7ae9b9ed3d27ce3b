"""Commands and functions that read a run's folder from outside, while the run lives or after it has ended.

`status` shows who waits for whom, `ledger` what became of every rollout, `streams` the records, `report` the summary.
`outside` opens the streams. Nothing here changes a run.
"""
