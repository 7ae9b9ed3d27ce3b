"""Runs an agent against a recording endpoint. The agent is a Python function (sync or async) or a program."""

import asyncio
import contextlib
import fnmatch
import functools
import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp

from pipelinerl.agents.endpoint import RecordedAgent, record_agent
from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.errors import DomainError
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult
from pipelinerl.world.process import kept
from pipelinerl.world.proxies import BYPASS_VARIABLES, bypass

log = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 2**22
"""Bytes kept of a program's output, and of its error output. A million tokens fit, and 100 programs stay below 1 GB."""
READ_BYTES = 2**16
"""One chunk: the capacity of a pipe."""


async def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs ``function(*args, **kwargs)`` in a new thread, and returns its result or raises its error.

    A function that never returns delays neither other calls, as it would in the loop's small pool of threads, nor the
    end of the process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def set_outcome(result: Any, error: BaseException | None) -> None:
        if not ended.done():
            ended.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        except BaseException as raised:  # noqa: BLE001 — of the user's code: raised again below
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so there is no waiter
            loop.call_soon_threadsafe(set_outcome, result, error)

    threading.Thread(target=work, name=getattr(function, "__name__", "agent"), daemon=True).start()
    result, error = await ended
    if error is not None:
        raise error
    return result


PASSED_VARIABLES = (
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_*", "TZ", "TERM", "TMPDIR", "VIRTUAL_ENV", "CONDA_PREFIX",
    "PYTHONPATH", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE", "OMP_NUM_THREADS", "NODE_PATH", "XDG_*",
)  # fmt: skip
"""Names and patterns of the environment variables that an agent's process gets. None holds a credential."""
Score = Callable[[Any], tuple[float, bool]]
"""Return value of the agent → (reward, success)."""


async def run_agent(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    agent: Callable[[str, str], Any],
    score: Score,
    *,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Runs ``agent(base_url, api_key)`` and rewards its return value.

    Args:
        llm: the policy.
        session: HTTP session of the rollout.
        agent: a coroutine function runs on this loop. A plain function runs in a thread and may use a blocking client.
        score: turns the agent's return value into (reward, success).
        dataset_name: groups the metrics.
    """
    async with record_agent(llm, session) as recorded:
        if inspect.iscoroutinefunction(agent):
            answer = await agent(recorded.base_url, recorded.api_key)
        else:
            answer = await in_thread(agent, recorded.base_url, recorded.api_key)
        return _rewarded(recorded, answer, score, dataset_name)


async def run_agent_process(
    llm: TrainableLLM,
    session: aiohttp.ClientSession,
    command: Sequence[str],
    score: Callable[[str], tuple[float, bool]],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    passed_variables: Sequence[str] = PASSED_VARIABLES,
    dataset_name: str | None = None,
) -> RolloutResult:
    """Runs a program that reads `OPENAI_BASE_URL` and `OPENAI_API_KEY`, or Anthropic's, and rewards its output.

    The program and all its descendants are killed when the program, the rollout, the worker or the run ends. ``score``
    gets the last ``MAX_OUTPUT_BYTES`` of the output.

    Args:
        llm: the policy.
        session: the HTTP session of the rollout.
        command: the program and its arguments.
        score: turns the program's output into (reward, success).
        stdin: text on the program's standard input.
        env: further environment variables of the program.
        passed_variables: names or patterns (``LC_*``) of this process's variables that the program gets.
        dataset_name: groups the metrics.

    Raises:
        DomainError: the program ended with a non-zero status.
    """
    async with record_agent(llm, session) as recorded:
        environment = agent_environment(os.environ, recorded, env or {}, passed_variables)
        status, out, err = await run_program(command, stdin, environment)
        if status and recorded.failure is None:
            message = err.decode(errors="replace")[-500:]
            raise DomainError(f"{command[0]} ended with status {status}: {message}")
        return _rewarded(recorded, out.decode(errors="replace"), score, dataset_name)


async def run_program(command: Sequence[str], stdin: str, env: Mapping[str, str]) -> tuple[int | None, bytes, bytes]:
    """Runs a program to its end. Returns status, output and error output. Its descendants end with it."""
    process = await asyncio.create_subprocess_exec(
        *kept(command, patience_s=0),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
        start_new_session=True,
    )
    assert process.stdin
    assert process.stdout
    assert process.stderr
    try:
        out, err, *_ = await asyncio.gather(
            read_end(process.stdout, command[0]),
            read_end(process.stderr, command[0]),
            write_all(process.stdin, stdin.encode(errors="replace")),
            process.wait(),
        )
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGCONT)  # the program may have stopped its keeper
        await process.wait()
    return process.returncode, out, err


async def write_all(stream: asyncio.StreamWriter, content: bytes) -> None:
    """Writes and closes the stream. Its reader may close it early."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(content)
        await stream.drain()
    stream.close()


async def read_end(stream: asyncio.StreamReader, program: str) -> bytes:
    """Reads to the end of the stream, so that its writer never waits, and returns the last ``MAX_OUTPUT_BYTES``."""
    found = bytearray()
    while chunk := await stream.read(READ_BYTES):
        found += chunk
        if (excess := len(found) - MAX_OUTPUT_BYTES) > 0:
            warn_cut(program)
            del found[:excess]
    return bytes(found)


@functools.cache
def warn_cut(program: str) -> None:
    """Warns, once per program, that the beginning of its output was dropped."""
    log.warning("event=output_cut program=%s limit_bytes=%d: only the end of it is read", program, MAX_OUTPUT_BYTES)


def agent_environment(
    ours: Mapping[str, str], recorded: RecordedAgent, extra: Mapping[str, str], passed: Sequence[str] = PASSED_VARIABLES
) -> dict[str, str]:
    """Builds the environment of an agent's process: passed variables, the policy's address, and the run's markers.

    By the markers, the launcher finds the process and its children even after the worker died. Requests to the policy
    bypass proxies (`world.proxies`).

    Args:
        ours: environment of this process.
        recorded: the endpoint.
        extra: further variables. They override all others.
        passed: names or patterns of variables to copy from ``ours``.
    """
    wanted = (*passed, RUN_VARIABLE, ROLE_VARIABLE, *BYPASS_VARIABLES)
    clean = {name: value for name, value in ours.items() if any(fnmatch.fnmatchcase(name, one) for one in wanted)}
    environment = clean | recorded.variables | dict(extra)
    bypass(environment, ours.get(BYPASS_VARIABLES[0], "").split(","))
    return environment


def _rewarded(recorded: RecordedAgent, answer: Any, score: Score, dataset_name: str | None) -> RolloutResult:
    reward, success = score(answer) if recorded.failure is None else (0.0, False)
    return recorded.result(reward=reward, success=success, dataset_name=dataset_name)
