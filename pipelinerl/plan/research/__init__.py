"""Checks of the planner's models against simulation and against runs, and the scaling fit (docs/algorithms.md §8, §9).

Nobody needs these to plan a run; the commands `compare`, `scaling` and `split --simulate` show them.
"""
