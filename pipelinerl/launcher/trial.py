"""A trial before the start: code in a process of its own, so that neither its imports nor its bugs reach this one.

`run_trial` is the launcher's side, `answer` the child's. Both send JSON over the child's standard streams.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pipelinerl.launcher import reaper
from pipelinerl.launcher.commands import inherited_environment
from pipelinerl.launcher.processes import Reaper, RunMark, describe_exit
from pipelinerl.world.process import kept


class TrialError(Exception):
    """The child ended without an answer. `how`: exit code or signal. The text is the last line of its errors."""

    def __init__(self, how: str, last_line: str):
        super().__init__(last_line)
        self.how = how


class TrialTimeoutError(Exception):
    """The child did not answer within `timeout_s`."""

    def __init__(self, timeout_s: float):
        super().__init__(f"has not ended after {timeout_s:g} s")
        self.timeout_s = timeout_s


def run_trial(*arguments: str, job: Any = None, timeout_s: float) -> dict[str, Any]:
    """Run Python with these arguments and return its answer. All processes that it started end with it.

    Args:
        job: plain values for JSON.

    Raises:
        TrialError: the child died, or did not answer.
        TrialTimeoutError: the child did not end in time.
    """
    mark = RunMark()
    watchdog = Reaper(mark, grace_s=0)
    process = subprocess.Popen(
        kept([sys.executable, *arguments], math.inf),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**inherited_environment(os.environ), **mark.variables("trial"), "TMPDIR": watchdog.temporary},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(json.dumps(job), timeout=timeout_s)
    except subprocess.TimeoutExpired as slow:
        raise TrialTimeoutError(timeout_s) from slow
    finally:
        reaper.sweep(mark.run, grace_s=0)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream:
                stream.close()
        watchdog.dismiss()
    if process.returncode or not output.strip():
        raise TrialError(describe_exit(process.returncode), (errors.strip().splitlines() or ["no message"])[-1])
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found


def answer(work: Callable[[Any], Mapping[str, Any]]) -> NoReturn:
    """Answer the job with the result of `work`, and exit at once without waiting for other threads."""
    job = json.load(sys.stdin)
    ours = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # prints of the tried code are not the answer
    found = work(job)
    ours.write(json.dumps(found) + "\n")
    ours.flush()
    os._exit(0)
