"""Runs programs that nobody has read: no network, no view of the run, bounded time, memory, processes and output.

`Sandbox.run` starts `inside/jail.py` in a process of its own for every program and always returns what was seen of it;
when it returns, nothing the program started is alive and nothing it wrote is left. `modes` says by which means.
"""

from pipelinerl.sandbox.runner import Limits, Outcome, Sandbox

__all__ = ["Limits", "Outcome", "Sandbox"]
