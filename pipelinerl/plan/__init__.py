"""Throughput, lag and scaling models (docs/algorithms.md §8, §9) and the command that plans a run with them.

Pure functions over plain values. Nothing here starts, measures or changes a run. `benchmarks` checks the models.
"""
