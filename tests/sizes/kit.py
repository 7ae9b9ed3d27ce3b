"""Groups, contexts and results of the size tests."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.synthetic_groups import group_of
from pipelinerl.config.load import compose, parse
from pipelinerl.membership.role import RoleContext
from pipelinerl.records import ActorRecord, Rollout, RolloutGroup, TrainingSequence, topics
from pipelinerl.streams import SingleStreamSpec, open_writer
from pipelinerl.world import Job, WorldMap

VOCAB = 64
PROMPT = 2
SIZES = [(1, 1), (1, 8), (1, 64), (8000, 1), (8000, 8), (8000, 64), (32_000, 1), (32_000, 8), (32_000, 64)]
"""(tokens of a completion, attempts)"""


def sized_group(
    position: int, attempts: int, tokens: int, *, prompt: int = PROMPT, texts: int = 1, spans: int = 1, version: int = 0
) -> RolloutGroup:
    """Every rollout has ``texts`` sequences of ``tokens`` sampled tokens, of ``spans`` weight versions."""
    ids = (np.arange(prompt + tokens) % VOCAB).astype(np.int32)
    cuts = prompt + np.linspace(0, tokens, spans + 1).astype(int)
    table = np.array([(cuts[i], cuts[i + 1], version + i) for i in range(spans)], np.int32)
    sequence = TrainingSequence(
        token_ids=ids, logprobs=np.full(tokens, -0.5, np.float32), spans=table, finish_reason="stop"
    )
    rollouts = tuple(
        Rollout(
            attempt=i,
            reward=float(i % 2),
            sequences=(sequence,) * texts,
            metrics={},
            latency_s=0.0,
            num_llm_calls=texts,
        )
        for i in range(attempts)
    )
    return group_of(position, rollouts, "d", dispatched_version=version, settled_before=position)


def write_groups(run_dir: Path, groups: Any) -> None:
    with open_writer(SingleStreamSpec(run_dir, topics.ACTOR), ActorRecord) as writer:
        for group in groups:
            writer.write(group)


def preprocessor_context(run_dir: Path, *overrides: str, ranks: int = 1) -> RoleContext:
    """The preprocessor's role without a launcher; nobody reads its status."""
    (run_dir / "model").mkdir(exist_ok=True)
    (run_dir / "model" / "config.json").write_text(f'{{"vocab_size": {VOCAB}}}')
    jobs = (Job(name="preprocessor_0", kind="preprocessor"), Job(name="finetune_0", kind="finetune", num_ranks=ranks))
    world = WorldMap(accelerator="cpu", nodes=(), jobs=jobs, master_port=0, weight_port=0, weight_ports=0)
    given = [f"output_dir={run_dir}", f"model_path={run_dir / 'model'}", "dataset_loader=a.b", "wandb.mode=disabled"]
    cfg = parse(compose("base", [*given, "actor.rollout_policy=a.b", "preprocess.max_ready_steps=100000", *overrides]))
    status: Any = SimpleNamespace(progress=lambda **_: None, waiting=lambda *_, **__: nullcontext())
    return RoleContext(run_dir=run_dir, job=jobs[0], cfg=cfg, world=world, status=status, stop=threading.Event())
