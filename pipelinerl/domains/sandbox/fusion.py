"""Runs programs in SandboxFusion: ``POST <endpoint>/run_code``, one request per test."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import aiohttp

from pipelinerl.domains.sandbox.protocol import Outcome, run_in_turn
from pipelinerl.errors import VerifierError

RETRIES = 4
FIRST_DELAY_S = 0.5
"""The delays double, and add up to 7.5 s. After that the attempt is repeated as a whole."""
MAX_CONCURRENT = 64
"""Concurrent requests of a worker, for all its rollouts."""
RUN_TIMEOUT_S = 10.0
"""Default of `sandbox_timeout_s`, and the default of SandboxFusion."""
SPARE_S = 30.0
"""Seconds that an answer may take beyond three times the longest run: the service queues programs."""

_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
"""One for each event loop, that is for each worker."""


class SandboxFusion:
    """A client for one endpoint, over the rollout's HTTP session. ``run_timeout_s`` limits one run of a program."""

    def __init__(self, endpoint: str, session: aiohttp.ClientSession, *, run_timeout_s: float = RUN_TIMEOUT_S):
        self._url = f"{endpoint.rstrip('/')}/run_code"
        self._session = session
        self._run_timeout_s = run_timeout_s
        self._slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CONCURRENT))

    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        """See ``ProgramRunner``. A request without an answer is repeated ``RETRIES`` times."""
        return await run_in_turn(partial(self._run, code), stdins)

    async def _run(self, code: str, stdin: str) -> Outcome:
        body = {"code": code, "language": "python", "stdin": stdin, "run_timeout": self._run_timeout_s}
        timeout = aiohttp.ClientTimeout(total=self._run_timeout_s * 3 + SPARE_S)
        failure: Any = None
        for attempt in range(RETRIES + 1):
            if attempt:
                await asyncio.sleep(FIRST_DELAY_S * 2 ** (attempt - 1))
            try:
                async with self._slots, self._session.post(self._url, json=body, timeout=timeout) as answer:
                    if answer.status == 200:
                        result = await answer.json()
                        if result.get("status") != "SandboxError":
                            return outcome_of(result)
                        failure = result.get("message")
                    else:
                        failure = f"status {answer.status}"
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise VerifierError(f"SandboxFusion at {self._url} did not run the program: {failure}")


def outcome_of(result: dict[str, Any]) -> Outcome:
    """Converts SandboxFusion's answer. Raises ``VerifierError`` if it holds no run."""
    run = result.get("run_result") or {}
    status = run.get("status")
    if status not in ("Finished", "TimeLimitExceeded", "Error"):
        raise VerifierError(f"SandboxFusion answered without a run: {str(result)[:300]}")
    code = run.get("return_code")
    return Outcome(
        ended="time" if status == "TimeLimitExceeded" else "exited" if status == "Finished" else "signal",
        exit_code=0 if code is None else int(code),
        seconds=float(run.get("execution_time") or 0.0),
        stdout=run.get("stdout") or "",
        stderr=run.get("stderr") or "",
    )
