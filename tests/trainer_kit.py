"""The trainer's surroundings in tests: the one fake of its sender, and the context of its role without a launcher."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from pipelinerl.config.sections import Config
from pipelinerl.finetune.build import make_engine
from pipelinerl.finetune.engines import read_ranks
from pipelinerl.finetune.loop import connect_weights
from pipelinerl.finetune.updates import EvaluationLease, WeightUpdates
from pipelinerl.membership.role import RoleContext
from pipelinerl.records import WeightUpdateSuccess
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.announcements import PushStats
from pipelinerl.weights.publish.versions import SnapshotPlan
from pipelinerl.weights.verify.probe import ProbeText
from pipelinerl.world import Job

SERVER = "actor_llm_0"


class FakeSender:
    """`finetune.updates.Sender` with one server that takes every update, once the test lets it. Makes itself."""

    def __init__(self, *, keeps_weights: bool = True, wants_scores: bool = True) -> None:
        """``keeps_weights``: remember the tensors of every version, else only read them.

        ``wants_scores``: a comparison of log-probabilities is due. The test sets ``needs_scores`` when it is overdue.
        """
        self.keeps_weights, self.due, self.needs_scores = keeps_weights, wants_scores, wants_scores
        self.received: list[tuple[int, dict[str, Tensor]]] = []
        self.scores: list[Future[np.ndarray] | None] = []
        self.text: ProbeText | None = None
        self.error: Exception | None = None
        self.stats = PushStats()
        self.num_answering, self.is_busy = 1, False
        """The test sets it; updates are announced when it is not."""
        self._announce: Callable[[Any], object] = lambda message: None

    def __call__(self, ctx: Any, engine: Any, announce: Callable[[Any], object] | None) -> tuple[Any, Any]:
        """As `finetune.loop.connect_weights`: this rank's end and, on rank 0, the sender."""
        if announce is None:
            return self, None
        self._announce = announce
        return self, self

    def take_snapshot(
        self, version: int, params: Iterable[tuple[str, Tensor]], specs: Sequence[Any], plan: SnapshotPlan
    ) -> None:
        """Reads the parameters, as a rank above 0 does."""
        for _ in params:
            pass

    def plan(self) -> SnapshotPlan:
        return SnapshotPlan()

    def wants_scores(self, *, is_idle: bool) -> bool:
        return self.due and (is_idle or self.needs_scores)

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int, timeout_s: float) -> ProbeText:
        tokens = np.random.default_rng(seed).integers(0, vocab_size, shape)
        return ProbeText(token_ids=tokens.astype(np.int32))

    def check_with(self, text: ProbeText) -> None:
        self.text = text

    def wait_for_servers(self, count: int, timeout_s: float) -> int:
        return 1

    def send(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        specs: Sequence[Any],
        scores: "Future[np.ndarray] | None" = None,
        plan: SnapshotPlan | None = None,
    ) -> None:
        assert not self.is_busy
        told, taken = iter(specs), {}
        for name, tensor in params:
            spec = next(told)
            assert spec == spec_of(name, tensor)
            if self.keeps_weights:
                taken[name] = tensor.clone()
        assert next(told, None) is None, "more parameters were announced than sent"
        self.received.append((version, taken))
        self.scores.append(scores)
        self.stats = PushStats(version=version, servers=(SERVER,), pause_ms=5.0, transfer_ms=9.0)
        self._announce(WeightUpdateSuccess(version=version, servers=(SERVER,), pause_ms=(5.0,), transfer_ms=9.0))

    def wait_live(self, version: int, timeout_s: float) -> bool:
        self.check()
        return self.stats.version >= version

    def close(self) -> None: ...


def trainer_overrides(run_dir: Path, *more: str) -> list[str]:
    """The configuration of a trainer in float32 that learns fast, with the model in its run folder."""
    return [
        f"output_dir={run_dir}",
        f"model_path={run_dir / 'model'}",
        "dataset_loader=a.b",
        "actor.rollout_policy=a.b",
        "wandb.mode=disabled",
        "finetune.learning_rate=1e-2",
        "finetune.dtype=float32",
        *more,
    ]


@dataclass
class SendingRank:
    """A rank of a trainer with its end of weight updates, and on rank 0 the sender."""

    engine: Any
    origin: Any
    sender: Any
    updates: WeightUpdates
    num_servers: int

    def close(self) -> None:
        if self.sender is not None:
            self.sender.close()
        self.origin.close()
        self.engine.close()


def sending_rank(run_dir: Path, cfg: Config, servers: Sequence[tuple[str, str]]) -> SendingRank:
    """This process as a rank on the CPU that sends weights to servers, of which name and URL are given."""
    rank, world_size, device = read_ranks("cpu")
    ctx = trainer_context(run_dir, cfg, num_ranks=world_size)
    world: Any = ctx.world
    world.jobs = [Job(name=name, kind="actor_llm", replica_idx=i, url=url) for i, (name, url) in enumerate(servers)]
    world.weight_port, world.transfer_backend = 0, lambda wanted: "tcp"
    engine = make_engine(cfg, device, world_size)
    origin, sender = connect_weights(ctx, engine, (lambda message: None) if rank == 0 else None)
    lease = EvaluationLease(lambda: []) if rank == 0 else None
    updates = WeightUpdates(engine, cfg, origin, sender, lease, ctx.status, lambda: False, run_dir)
    return SendingRank(engine, origin, sender, updates, len(servers))


def trainer_context(run_dir: Path, cfg: Config, num_ranks: int = 1) -> RoleContext:
    """The trainer's role on one CPU core beside one server; nobody reads its status.

    A trainer collects garbage before its first step. Of what this process has imported, that would take a second.
    """
    gc.freeze()
    jobs = {
        "finetune": (Job(name="finetune_0", kind="finetune", cores=(0,), num_ranks=num_ranks),),
        "actor_llm": (Job(name=SERVER, kind="actor_llm"),),
    }
    world: Any = SimpleNamespace(accelerator="cpu", trainer_world_size=num_ranks, get=lambda kind: jobs.get(kind, ()))
    status: Any = SimpleNamespace(progress=lambda **_: None, waiting=lambda *_, **__: contextlib.nullcontext())
    return RoleContext(
        run_dir=run_dir, job=jobs["finetune"][0], cfg=cfg, world=world, status=status, stop=threading.Event()
    )
