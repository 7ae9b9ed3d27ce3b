"""Runs untrusted programs: no network, no access to the run, bounded time, memory, processes and output.

``Sandbox.run_python`` sends every program to one warm *jail* process, which forks a supervisor, an init process and the
program, once per input. When it returns, all processes that the program started have ended, and its files are gone.
``runner`` lists the means.
"""

from pipelinerl.domains.sandbox.protocol import Outcome, ProgramRunner
from pipelinerl.domains.sandbox.runner import Limits, Sandbox

__all__ = ["Limits", "Outcome", "ProgramRunner", "Sandbox"]
