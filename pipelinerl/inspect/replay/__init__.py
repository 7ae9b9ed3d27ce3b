"""Computes an optimizer step of a run again, from the run's records, and shows each token's contribution to the loss.

`inputs` makes a replay folder from the run, with the micro-batches of its steps. `rank` trains from the checkpoint to
the step. `compare` says where the replayed figures differ from those that the run recorded, and `show` prints them.
"""
