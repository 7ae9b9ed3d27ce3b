"""The common entry of every role: `python -m pipelinerl.<folder> --run ADDRESS --job J`.

Reads the run folder, or makes one from the run's redis address. Sets up log, heartbeat, streams and lease, and runs the
role. Exit codes: 0 it returned (done, or SIGTERM), 1 an error, 2 an error that a restart cannot repair, 3 it left the
run on request, 4 the disk is full. The last log line has the reason.
"""

import argparse
import atexit
import contextlib
import errno
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipelinerl.config.environment import in_utf8
from pipelinerl.config.sections import Config
from pipelinerl.errors import (
    EXIT_REFUSED,
    ConfigError,
    CorruptStreamError,
    DomainError,
    LeftError,
    PipelineRLError,
    ServersExpelledError,
    WorldError,
)
from pipelinerl.observability import spans
from pipelinerl.observability.logging import setup_role_logging
from pipelinerl.observability.status import RoleStatus
from pipelinerl.world.environment import complete
from pipelinerl.world.process import die_with_parent, own_rank, raise_open_files

if TYPE_CHECKING:
    from pipelinerl.membership.entry import Entry, Membership
    from pipelinerl.membership.watch import ServerView
    from pipelinerl.world import Job, WorldMap

log = logging.getLogger(__name__)

EXIT_FAILED = 1  # as for any error of Python's
EXIT_LEFT = 3
"""The role left the run on request."""
EXIT_DISK_FULL = 4
"""The role could not write for lack of space, and can go on as soon as there is some."""
SAYS_FULL = ("(os error 28)", "(os error 122)", "used memory > 'maxmemory'")
"""What safetensors and redis say of no space, a quota and `maxmemory`, in errors without a number."""
MODEL_POLL_S = 0.05
"""Longest delay of a role's start behind the end of the tiny model's builder."""
UNMENDABLE = (ConfigError, DomainError, WorldError, ServersExpelledError, CorruptStreamError, ImportError, SyntaxError)
"""Errors that a restart cannot repair. The role ends with `EXIT_REFUSED` and the supervisor stops the run."""
CORRUPT_ADVICE = (
    ". `python -m pipelinerl.streams verify RUN` describes the damage. The same command with resume=checkpoint "
    "continues from the newest good checkpoint with new streams"
)


@dataclass(frozen=True, kw_only=True)
class RoleContext:
    """The argument of every role's main function. SIGTERM and SIGINT set `stop`: the role must then return."""

    run_dir: Path
    job: "Job"
    cfg: Config
    world: "WorldMap"
    status: RoleStatus
    stop: threading.Event
    membership: "Membership | None" = None
    """None: the run has no leases, and its servers are the placed jobs."""

    @property
    def server_view(self) -> "ServerView":
        """The servers that are in the run now."""
        from pipelinerl.membership.watch import PlacedJobs

        return PlacedJobs(self.world.jobs) if self.membership is None else self.membership.watch

    def wait_for_model(self) -> None:
        """Wait until a tiny model is built. Call it after the role's imports. A builder that fails ends the run."""
        built = Path(self.cfg.model_path) / "config.json"
        if self.cfg.tiny_model is None or built.is_file():
            return
        with self.status.waiting_for_launcher("the tiny model"):
            while not built.is_file() and not self.stop.wait(MODEL_POLL_S):
                pass


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off during large imports, where it would take a tenth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_role(main: Callable[[RoleContext], None]) -> NoReturn:
    """Run a role's main function in its context and leave the process with its exit code."""
    in_utf8()
    args = role_parser().parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    die_with_parent()
    raise_open_files()
    try:
        notes = complete(os.environ)  # a pod that starts one role has no launcher
    except ConfigError as error:
        leave(_code_of(error))
    setup_role_logging(status_name(args.job))
    for note in notes:
        log.info("event=environment_completed note=%s", note)
    leave(_run(main, args, stop))


def role_parser() -> argparse.ArgumentParser:
    """The command line of every role."""
    parser = argparse.ArgumentParser(description="A role of a PipelineRL run: started by the launcher, or alone.")
    parser.add_argument("--run", help="address of the run: its folder, or redis://HOST:PORT/RUN")
    parser.add_argument(
        "--run-dir", type=Path, help="the run's folder; with a redis address, one of the role's own (default: ./RUN)"
    )
    parser.add_argument(
        "--job", required=True, help="a job of the world, e.g. actor_0; or a kind that joins, e.g. actor_llm"
    )
    parser.add_argument("--host", help="this role's address for others, if the world has a wrong one or none")
    parser.add_argument("--port", type=int, help="port to listen on, likewise")
    parser.add_argument("--serves", type=int, help="a server that joins: the replica of the actor that uses it")
    parser.add_argument("--nodes", type=int, default=1, help="a server on several nodes: how many it has")
    parser.add_argument("--node", type=int, default=0, help="likewise: which one this is, 0 … nodes - 1")
    parser.add_argument("--meet", metavar="HOST:PORT", help="likewise: where its node 0 is, and a free port there")
    return parser


def leave(code: int) -> NoReturn:
    """End the process: its exit handlers run, but the interpreter is not finalized."""
    # A thread of Gloo may release a tensor after the collective, and the process aborts if Python is being finalized
    # then (pytorch pull request 179291).
    atexit._run_exitfuncs()  # noqa: SLF001 — os._exit runs no handlers
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(main: Callable[[RoleContext], None], args: argparse.Namespace, stop: threading.Event) -> int:
    from pipelinerl.membership.entry import enter
    from pipelinerl.membership.joining import Whereabouts, read_span

    cores = tuple(sorted(os.sched_getaffinity(0)))
    try:
        span = read_span(args.nodes, args.node, args.meet)
        place = Whereabouts(hostname=args.host, port=args.port, serves=args.serves, cores=cores, span=span)
        entry = enter(args.run, args.run_dir, args.job, place)
    except Exception as error:  # noqa: BLE001 — the process boundary: the error ends the role
        return _code_of(error)
    setup_role_logging(status_name(entry.job.name))
    status = RoleStatus(entry.run_dir, status_name(entry.job.name))
    code = _play(main, entry, status, stop)
    status.close("failed" if code in (EXIT_FAILED, EXIT_REFUSED, EXIT_DISK_FULL) else "done")
    return code


def _play(main: Callable[[RoleContext], None], entry: "Entry", status: RoleStatus, stop: threading.Event) -> int:
    """Run the role while it holds its lease, and return its exit code."""
    from pipelinerl.membership.entry import take_part
    from pipelinerl.streams import backend_from_config

    membership = None
    try:
        backend_from_config(entry.cfg, entry.run_dir)
        spans.start_recording(entry.cfg, entry.run_dir, status_name(entry.job.name))
        membership = take_part(entry, status.last_beat, lambda: os.kill(os.getpid(), signal.SIGTERM))
        main(
            RoleContext(
                run_dir=entry.run_dir,
                job=entry.job,
                cfg=entry.cfg,
                world=entry.world,
                status=status,
                stop=stop,
                membership=membership,
            )
        )
    except Exception as error:  # noqa: BLE001 — the process boundary: the error ends the role
        return _code_of(error)
    finally:
        if membership is not None:
            membership.close()
    log.info("event=role_ended")
    return 0


def _code_of(error: Exception) -> int:
    """Log the error that ended the role and return the exit code."""
    if isinstance(error, LeftError):
        log.info("event=role_left reason=%s", error)
        return EXIT_LEFT
    if not isinstance(error, PipelineRLError):
        log.error("event=unexpected_error", exc_info=error)
    advice = CORRUPT_ADVICE if isinstance(error, CorruptStreamError) else ""
    log.error("event=role_failed reason=%s: %s%s", type(error).__name__, error, advice)
    if isinstance(error, UNMENDABLE):
        return EXIT_REFUSED
    return EXIT_DISK_FULL if is_disk_full(error) else EXIT_FAILED


def is_disk_full(error: BaseException | None) -> bool:
    """Whether a full file system, or a full redis, is the cause of this error."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(words in str(error) for words in SAYS_FULL):
            return True
        error = error.__cause__ or error.__context__
    return False


def status_name(job_name: str) -> str:
    """Name of this process's status. Ranks above 0 of a distributed job have their own: `finetune_0.rank1`."""
    rank = own_rank(job_name)
    return f"{job_name}.rank{rank}" if rank else job_name
