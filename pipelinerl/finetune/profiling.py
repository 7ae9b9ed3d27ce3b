"""Chrome traces of some optimizer steps: of trainer rank 0 by torch's profiler, of one policy server by vLLM's own.

The server was started with its profiler set up (`inference.args.profiling`). Nothing waits for its answers: without
them its trace is missing, no more.
"""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import torch

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.paths import PROFILES
from pipelinerl.membership.role import RoleContext
from pipelinerl.membership.watch import ServerView
from pipelinerl.world.disk import make_folder
from pipelinerl.world.proxies import own_client

log = logging.getLogger(__name__)

SERVER_TIMEOUT_S = 60.0
"""A server answers the end of a profile when it has written its trace."""


class ServerProfile:
    """Starts and stops the profiler of the first policy server of ``view``, in a thread of its own."""

    def __init__(self, view: ServerView):
        self._view, self._url = view, ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="server_profile")

    def start(self) -> None:
        self._thread.submit(self._post, "/start_profile")

    def stop(self) -> None:
        self._thread.submit(self._post, "/stop_profile")

    def _post(self, path: str) -> None:
        servers = self._view.servers("actor_llm")
        self._url = self._url or (servers[min(servers)].job.url if servers else "")
        headers = {"Authorization": f"Bearer {os.environ.get(SECRET_VARIABLE, '')}"}
        try:
            with httpx.Client(base_url=self._url, headers=headers, timeout=SERVER_TIMEOUT_S, **own_client()) as client:
                client.post(path).raise_for_status()
        except httpx.HTTPError as error:
            log.warning("event=server_not_profiled url=%s path=%s error=%s", self._url or None, path, error)

    def close(self) -> None:
        """Wait until the server has answered."""
        self._thread.shutdown()


class StepProfile:
    """Profiles the optimizer steps from ``first`` to ``last``, both included, into a file of the run folder."""

    def __init__(self, first: int, last: int, run_dir: Path, server: ServerProfile):
        self._steps, self._server = range(first, last + 1), server
        self.path = run_dir / PROFILES / f"finetune_0.steps_{first}_{last}.json.gz"
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        """``step`` has its data."""
        if step in self._steps and self._profiler is None:
            self._server.start()
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after(self, step: int) -> None:
        """``step`` has been trained, and its weights are on their way."""
        if step + 1 not in self._steps:
            self._write()

    def close(self) -> None:
        """Write what a run that ends early has recorded."""
        self._write()
        self._server.close()

    def _write(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        self._server.stop()
        make_folder(self.path.parent)
        profiler.export_chrome_trace(str(self.path))
        log.info("event=profile_written path=%s", self.path)


def open_profile(ctx: RoleContext, rank: int) -> StepProfile | None:
    """The profile that `finetune.profile_steps` asks of this rank. None: of no step, or of another rank."""
    steps = ctx.cfg.finetune.profile_steps
    if steps is None or rank != 0:
        return None
    return StepProfile(*steps, ctx.run_dir, ServerProfile(ctx.server_view))
