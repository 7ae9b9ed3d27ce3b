"""An HTTP service that checks answers. Its judges run in worker processes with limits.

A check that exhausts its CPU time or memory gets the verdict ``unparsable``, because the answer is to blame. If a judge
raises, the verdict is ``error``, which is never a reward. The service survives both.
"""
