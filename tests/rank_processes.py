"""Ranks of a process group on this machine: each is a process of its own that calls the same function.

Within `benchmarks.receivers.forkserver` they are forked from one that has imported their module, which takes longer
than most of them run.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipelinerl.membership.role import leave
from tests.ports import free_port

TIMEOUT_S = 600


def start_ranks(
    main: Callable[[dict[str, Any]], None], job: dict[str, Any], out: Path, ranks: int, *, cuda: bool = False
) -> list[BaseProcess]:
    """Processes that call ``main(job)``, one per rank. What rank n prints is added to ``<out>.rank<n>.log``.

    Args:
        cuda: the ranks see this machine's GPUs. They are not forked, because a process that has used CUDA cannot be.
    """
    variables = os.environ | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {} if cuda else {"CUDA_VISIBLE_DEVICES": ""}
    context = multiprocessing.get_context("spawn" if cuda else "forkserver")
    processes = []
    for rank in range(ranks):
        own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_be_rank, args=(main, job, own, log_of(out, rank))))  # type: ignore[attr-defined]
        processes[-1].start()
    return processes


def log_of(out: Path, rank: int) -> Path:
    return out.with_suffix(f".rank{rank}.log")


def call_on_ranks(
    main: Callable[[dict[str, Any]], None], job: dict[str, Any], out: Path, ranks: int, *, cuda: bool = False
) -> None:
    """The same, and wait until all have ended well."""
    processes = start_ranks(main, job, out, ranks, cuda=cuda)
    for process in processes:
        process.join(TIMEOUT_S)
    for process in processes:
        process.kill()
        process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * ranks, "\n".join(log_of(out, rank).read_text()[-4000:] for rank in range(ranks))


def _be_rank(main: Callable[[dict[str, Any]], None], job: dict[str, Any], env: dict[str, str], log: Path) -> None:
    os.environ.update(env)
    printed = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    try:
        main(job)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)
