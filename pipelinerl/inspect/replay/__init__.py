"""Computes an optimizer step of a run again, from the run's records, and shows each token's contribution to the loss.

`inputs` makes a replay folder: configuration, checkpoint, micro-batches and the run's own figures of the step. It can
be packed into one file. `rank` trains from the checkpoint to the step in that folder. `compare` says where the replayed
figures differ from the recorded ones, and `show` prints them.
"""
