"""Commands and functions that read a run's folder from outside, during the run or after it, and do not change it."""
