"""Checks answers: an HTTP service whose judges run in limited worker processes.

A check that exhausts its CPU time or memory costs that check (``unparsable``: the answer is to blame); a judge that
could not do its work is ``error`` and never a reward. The service itself outlives both.
"""
