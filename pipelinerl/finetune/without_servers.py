"""The trainer's end of weight updates in a run without servers (`debug.mode=finetune`): nothing is sent."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor

from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.updates import Announce, Sender, StripeHolder
from pipelinerl.membership.role import RoleContext
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.publish.announcements import PushStats
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.verify.probe import ProbeText


class NoServers:
    """`finetune.updates.Sender` and `StripeHolder` of a world without servers. Reads no parameter, so gathers none."""

    stats = PushStats()
    is_busy = False

    def wants_scores(self, *, is_idle: bool) -> bool:
        return False

    def check(self) -> None: ...

    def plan(self) -> SnapshotPlan:
        return SnapshotPlan()

    def take_snapshot(
        self, version: int, params: Iterable[tuple[str, Tensor]], specs: Sequence[ParamSpec], plan: SnapshotPlan
    ) -> None: ...

    def send(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        specs: Sequence[ParamSpec],
        scores: "Future[np.ndarray] | None" = None,
        plan: SnapshotPlan | None = None,
    ) -> None: ...

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText | None:
        return None

    def check_with(self, text: ProbeText) -> None: ...

    @property
    def num_answering(self) -> int:
        return 0

    def wait_for_servers(self, count: int, timeout_s: float) -> int:
        return count

    def wait_live(self, version: int, timeout_s: float) -> bool:
        return True

    def close(self) -> None: ...


def connect_nobody(ctx: RoleContext, engine: Engine, announce: Announce | None) -> tuple[StripeHolder, Sender | None]:
    """As `finetune.loop.connect_weights`."""
    nobody: Any = NoServers()
    return nobody, None if announce is None else nobody
