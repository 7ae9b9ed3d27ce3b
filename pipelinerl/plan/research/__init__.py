"""Checks of the planner's models against simulation and against runs, and the scaling fit (docs/algorithms.md §8, §9).

Planning a run does not need them. The commands `compare`, `scaling` and `split --simulate` show their results.
"""
