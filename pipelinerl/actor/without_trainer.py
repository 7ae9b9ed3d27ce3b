"""Stands in the trainer's place in an actor without one (`debug.mode`): one version, on servers that answer."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pipelinerl.errors import DeadlineError
from pipelinerl.membership.lease import LiveServer
from pipelinerl.records import ProbeMissed
from pipelinerl.utils import is_healthy

ONLY_VERSION = 0
POLL_S = 0.5
"""Interval of the questions whether the servers answer."""


class OneVersion:
    """What the actor reads of the trainer (`loop.TrainerView`): `ONLY_VERSION`, until enough rollouts are made.

    Args:
        servers: returns this actor's servers with a valid lease, by name.
        is_enough: whether the actor has made all the rollouts that were asked for.
        startup_s: a server must answer within this time.
        silence_s: the actor fails if no server has answered for this time.
    """

    def __init__(
        self,
        servers: Callable[[], Mapping[str, LiveServer]],
        is_enough: Callable[[], bool],
        *,
        startup_s: float,
        silence_s: float,
    ):
        self._servers, self._is_enough = servers, is_enough
        self._startup_s, self._silence_s = startup_s, silence_s
        self._since = time.monotonic()
        self._serving: dict[str, int] | None = None
        """None: no server has answered yet."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="servers", daemon=True)

    def start_listening(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def weights(self) -> tuple[int | None, Mapping[str, int]]:
        """The version and the servers that answer. Raises ``DeadlineError`` if none answers for too long."""
        serving, quiet_s = self._serving, time.monotonic() - self._since
        limit_s = self._startup_s if serving is None else self._silence_s
        if not serving and quiet_s > limit_s:
            raise DeadlineError(
                f"no inference server has answered for {limit_s:g} s: {', '.join(sorted(self._servers())) or 'none'}"
            )
        return (None, {}) if serving is None else (ONLY_VERSION, serving)

    @property
    def verified(self) -> Mapping[str, int]:
        """Empty: without a trainer no server is probed."""
        return {}

    @property
    def training_done(self) -> bool:
        return self._serving is not None and self._is_enough()

    def take_misses(self) -> Sequence[ProbeMissed]:
        return ()

    def _watch(self) -> None:
        while not self._stop.is_set():
            live = self._servers()
            serving = {name: ONLY_VERSION for name, server in live.items() if is_healthy(server.job.url)}
            if serving:
                self._since = time.monotonic()
            if serving or self._serving is not None:
                self._serving = serving
            self._stop.wait(POLL_S)
