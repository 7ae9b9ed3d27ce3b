"""The servers as the trainer sees them: wait for them at the start, push snapshots, take back those that return."""

import logging
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Protocol

from pipelinerl.errors import DeadlineError, WeightUpdateError
from pipelinerl.finetune.publish import Report, Snapshot
from pipelinerl.observability.role import RoleContext
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.world import Job

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 2.0
POLL_S = 0.25


def is_healthy(server: Job) -> bool:
    """Whether the server answers `GET /health`."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=HEALTH_TIMEOUT_S) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


def wait_for_servers(
    servers: Sequence[Job],
    stop: Callable[[], bool],
    timeout_s: float,
    needed: int,
    healthy: Callable[[Job], bool] = is_healthy,
) -> list[Job]:
    """Servers that are up, once ``needed`` are, or as soon as ``stop()``.

    Raises:
        DeadlineError: fewer than ``needed`` within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        up = [server for server in servers if healthy(server)]
        if len(up) >= needed or stop():
            return up
        if time.monotonic() >= deadline:
            missing = [server.name for server in servers if server not in up]
            raise DeadlineError(
                f"inference servers {missing} did not answer /health within launcher.startup_timeout_s={timeout_s:g}; "
                f"see {missing[0]}/log.txt in the run folder"
            )
        time.sleep(POLL_S)


class Pushes(Protocol):
    """What the trainer's loop asks of the servers."""

    def wait_for_servers(self, stop: Callable[[], bool], resumed: bool) -> None: ...
    def push(self, version: int, snapshot: Snapshot) -> Report: ...
    def attend(self, version: int, snapshot: Snapshot) -> Report | None: ...
    def close(self) -> None: ...


class ServerPushes:
    """The weight sender of this run, bound to its servers."""

    def __init__(self, ctx: RoleContext):
        from pipelinerl.weights.sender import WeightSender

        self._servers = ctx.world.get("actor_llm")
        self._startup_timeout_s = ctx.cfg.launcher.startup_timeout_s
        weights = ctx.cfg.weights
        self._sender = WeightSender(
            self._servers,
            backend=ctx.world.weight_backend if weights.backend == "auto" else weights.backend,
            bucket_mb=weights.bucket_mb,
            timeout_s=weights.timeout_s,
            secret=os.environ.get("PIPELINERL_SECRET", ""),
            host=ctx.world.master_addr,
            port_base=ctx.world.weight_port,
            device="cuda" if ctx.world.accelerator == "cuda" else "cpu",
        )

    def wait_for_servers(self, stop: Callable[[], bool], resumed: bool) -> None:
        """A new run waits for all servers; a resumed one goes on as soon as one is up, the others return later."""
        wait_for_servers(self._servers, stop, self._startup_timeout_s, needed=1 if resumed else len(self._servers))

    def push(self, version: int, snapshot: Snapshot) -> Report:
        """Send to every server; an update that reaches none is an error."""
        report = self._sender.send(version, snapshot.items(), parameter_specs(snapshot))
        if not report.servers:
            raise WeightUpdateError(f"no server took version {version}: {report.errors}")
        return report

    def attend(self, version: int, snapshot: Snapshot) -> Report | None:
        """Give servers that came back the live weights; None when the servers in service stay the same."""
        return self._sender.poll_returning_servers(version, snapshot.items(), parameter_specs(snapshot))

    def close(self) -> None:
        self._sender.close()


def parameter_specs(snapshot: Snapshot) -> list[ParamSpec]:
    """What the servers must know before the bytes."""
    return [
        ParamSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in snapshot.items()
    ]
