"""Runs untrusted programs: no network, no view of the run, bounded time, memory, processes and output.

``Sandbox.run_python`` sends every program to one warm *jail* process, which forks: a supervisor outside of the
program's PID namespace, an init process inside of it, and the program, once per input. When it returns, nothing that
the program started is alive and nothing that it wrote is left. ``runner`` names the means.
"""

from pipelinerl.domains.sandbox.protocol import Outcome, ProgramRunner
from pipelinerl.domains.sandbox.runner import Limits, Sandbox

__all__ = ["Limits", "Outcome", "ProgramRunner", "Sandbox"]
