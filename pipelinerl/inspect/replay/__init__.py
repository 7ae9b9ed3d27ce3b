"""Computes an optimizer step of a run again, from the run's records, and shows each token's part of the loss."""
