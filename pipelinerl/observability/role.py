"""The common entry of every role: `python -m pipelinerl.<folder> --run-dir R --job J`.

Reads the run folder, sets up log, heartbeat and streams, runs the role, and turns its end into an exit code:
0 when it returns (done, or asked to stop by SIGTERM), 1 on an error, 2 on one that a restart cannot mend; the last log
line says why.
"""

import argparse
import atexit
import contextlib
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

from pipelinerl.config.load import load_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DomainError, PipelineRLError, ServersExpelledError, WorldError
from pipelinerl.observability.logging import setup_role_logging
from pipelinerl.observability.status import RoleStatus
from pipelinerl.process import die_with_parent, raise_open_files

if TYPE_CHECKING:
    from pipelinerl.world import Job, WorldMap

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_REFUSED = 2
MODEL_POLL_S = 0.05
UNMENDABLE = (ConfigError, DomainError, WorldError, ServersExpelledError, ImportError, SyntaxError)
"""What no restart can mend: the role ends with `EXIT_REFUSED` and the supervisor stops the run."""


@dataclass(frozen=True, kw_only=True)
class RoleContext:
    """What every role gets. `stop` is set by SIGTERM and SIGINT: end cleanly and return."""

    run_dir: Path
    job: "Job"
    cfg: Config
    world: "WorldMap"
    status: RoleStatus
    stop: threading.Event

    def wait_for_model(self) -> None:
        """Return when `model_path` can be read: a tiny model is built while the roles start.

        Call it after what the role imports. A builder that fails ends the run, so there is no deadline here.
        """
        built = Path(self.cfg.model_path) / "config.json"
        if self.cfg.tiny_model is None or built.is_file():
            return
        with self.status.waiting_for_launcher("the tiny model"):
            while not built.is_file() and not self.stop.wait(MODEL_POLL_S):
                pass


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around a role's large imports: the garbage collector would spend a tenth of their time and find nothing."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_role(main: Callable[[RoleContext], None]) -> NoReturn:
    """Run a role's main function in its context and leave the process with its exit code."""
    parser = argparse.ArgumentParser(description="A role of a PipelineRL run; started by pipelinerl.launch.")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder that the launcher wrote")
    parser.add_argument("--job", required=True, help="job name of the world map, e.g. actor_0")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    die_with_parent()
    raise_open_files()
    setup_role_logging(status_name(args.job))
    leave(_run(main, args.run_dir, args.job, stop))


def leave(code: int) -> NoReturn:
    """End the process: its exit handlers run, but the interpreter is not taken apart.

    A thread of Gloo may let go of a tensor some time after the collective was waited for. If Python is being finalized
    by then, the process aborts (pytorch pull request 179291), and a rank that did all its work counts as crashed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(main: Callable[[RoleContext], None], run_dir: Path, job_name: str, stop: threading.Event) -> int:
    status = RoleStatus(run_dir, status_name(job_name))
    try:
        main(_context(run_dir, job_name, status, stop))
    except Exception as error:  # the process boundary: the error ends the role
        if not isinstance(error, PipelineRLError):
            log.exception("unexpected error")
        log.error("role failed: %s: %s", type(error).__name__, error)
        status.close("failed")
        return EXIT_REFUSED if isinstance(error, UNMENDABLE) else EXIT_FAILED
    status.close("done")
    log.info("role ended")
    return 0


def _context(run_dir: Path, job_name: str, status: RoleStatus, stop: threading.Event) -> RoleContext:
    from pipelinerl.streams import backend_from_config
    from pipelinerl.world import WorldMap

    cfg = load_run(run_dir)
    world = WorldMap.load(run_dir)
    backend_from_config(cfg, run_dir)
    return RoleContext(run_dir=run_dir, job=world.job(job_name), cfg=cfg, world=world, status=status, stop=stop)


def status_name(job_name: str) -> str:
    """Ranks above 0 of a distributed job report beside it: `finetune_0.rank1`."""
    rank = int(os.environ.get("RANK", "0"))
    return f"{job_name}.rank{rank}" if rank else job_name
