"""A preprocessor on real streams: its world, its groups, its turns."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl import state
from pipelinerl.config.load import compose, parse
from pipelinerl.membership.role import RoleContext
from pipelinerl.preprocess.loop import Preprocessor
from pipelinerl.records import (
    ActorRecord,
    GroupDropped,
    Rollout,
    RolloutGroup,
    TrainingSequence,
    topics,
)
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from pipelinerl.world import Job, WorldMap

VOCAB = 50
DEADLINE_S = 200.0


def prepare_run(backend: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Choose the streams' backend and put a model into the folder."""
    set_streams_backend(backend)
    monkeypatch.setattr(state, "_POLL_S", 0.02)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(f'{{"vocab_size": {VOCAB}}}')
    return folder


def make_world(*, replicas: int = 1, ranks: int = 1, reference_servers: int = 0) -> WorldMap:
    jobs = [Job(name=f"preprocessor_{r}", kind="preprocessor", replica_idx=r) for r in range(replicas)]
    jobs += [Job(name=f"preprocessor_llm_{i}", kind="preprocessor_llm", url=f"u{i}") for i in range(reference_servers)]
    jobs.append(Job(name="finetune_0", kind="finetune", num_ranks=ranks))
    return WorldMap(accelerator="cpu", nodes=(), jobs=tuple(jobs), master_port=0, weight_port=0, weight_ports=0)


def make_context(run_dir: Path, world: WorldMap, *overrides: str, replica: int = 0) -> RoleContext:
    cfg = parse(
        compose(
            "base",
            [
                f"output_dir={run_dir}",
                f"model_path={run_dir / 'model'}",
                "dataset_loader=a.b",
                "actor.rollout_policy=a.b",
                "wandb.mode=disabled",
                "attempts=4",
                "finetune.gradient_accumulation_passes=6",
                "finetune.seq_length=64",
                "max_lag_steps=2",
                "preprocess.lag_drop=rollout",
                "preprocess.max_ready_steps=1000",
                *overrides,
            ],
        )
    )
    status: Any = SimpleNamespace(progress=lambda **_: None, waiting=lambda *_, **__: nullcontext())
    return RoleContext(
        run_dir=run_dir,
        job=world.job(f"preprocessor_{replica}"),
        cfg=cfg,
        world=world,
        status=status,
        stop=threading.Event(),
    )


def make_group(rng: np.random.Generator, position: int, *, version: int, reward: float | None = None) -> RolloutGroup:
    """Four rollouts of 4–40 tokens."""
    rollouts = []
    for attempt in range(4):
        total = int(rng.integers(4, 41))
        sequence = TrainingSequence(
            token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
            logprobs=-rng.random(total - 2, dtype=np.float32),
            spans=np.array([[2, total, version]], np.int32),
            finish_reason="stop",
        )
        value = float(rng.integers(0, 3)) if reward is None else reward
        rollouts.append(
            Rollout(attempt=attempt, reward=value, sequences=(sequence,), metrics={}, latency_s=0.0, num_llm_calls=1)
        )
    return RolloutGroup(
        group_id=f"0-{position}",
        epoch=0,
        position=position,
        problem_index=0,
        actor=0,
        domain="d",
        dataset="train",
        attempts=4,
        rollouts=tuple(rollouts),
        dispatched_version=version,
        settled_before=0,
        dispatch_index=position,
    )


def write_groups(run_dir: Path, groups: list[Any], instance: int = 0) -> None:
    with open_writer(SingleStreamSpec(run_dir, topics.ACTOR, instance), ActorRecord) as writer:
        for group in groups:
            writer.write(group)


def read_topic(run_dir: Path, topic: str, record_type: Any, instance: int = 0, partition: int = 0) -> list[Any]:
    with open_reader(SingleStreamSpec(run_dir, topic, instance, partition), record_type, name=None, start=0) as reader:
        return [record for _, record in reader.read_all()]


@contextmanager
def preprocessor(ctx: RoleContext) -> Iterator[Preprocessor]:
    role = Preprocessor(ctx)
    try:
        yield role
    finally:
        role.close()


def turn_until(role: Preprocessor, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the preprocessor did not get there"
        role.turn()


def consumed(role: Preprocessor, groups: int) -> Callable[[], bool]:
    return lambda: role.totals.counted_until[0] >= groups - 1 and not role.totals.pending


def aging_groups(count: int) -> list[Any]:
    """Groups that fall behind the step which trains them, with refused, filtered and dropped ones among them."""
    rng = np.random.default_rng(0)
    records: list[Any] = []
    for position in range(count):
        group = make_group(rng, position, version=max(0, position // 5 - int(rng.integers(0, 2))))
        if position % 7 == 3:
            group = make_group(rng, position, version=0, reward=1.0)
        if position % 9 == 5:
            group = msgspec.structs.replace(
                group, rollouts=(msgspec.structs.replace(group.rollouts[0], reward=float("nan")), *group.rollouts[1:])
            )
        records.append(group)
    fields = {name: getattr(records[0], name) for name in ("epoch", "problem_index", "actor", "domain", "dataset")}
    dropped = GroupDropped(
        **fields,
        group_id="0-999",
        position=999,
        attempts=4,
        reason="timeout",
        detail="",
        settled_before=0,
        dispatch_index=30,
    )
    return [*records[:5], dropped, *records[5:]]
