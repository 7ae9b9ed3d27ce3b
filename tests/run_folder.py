"""A run folder made by hand with the real writers: what people's commands read, without a run.

Two attempts-of-four groups per step, a policy that improves, one server. `Story` says what goes wrong in it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from benchmarks.synthetic_groups import group_of
from pipelinerl.config.load import compose, to_container
from pipelinerl.inspect.reading import look_into
from pipelinerl.observability.archive import ARCHIVE_DIR, StepArchive, chosen, flags_of
from pipelinerl.records import (
    ActorRecord,
    ArchivedRollout,
    ArchivedStep,
    EvaluationDone,
    PreprocessorProgress,
    Rollout,
    RolloutGroup,
    SamplesProcessed,
    ScoredSequence,
    ScoredStep,
    TrainingDone,
    TrainingSequence,
    WeightUpdateSuccess,
    topics,
)
from pipelinerl.records.messages import EvaluationMessage, TrainerMessage
from pipelinerl.streams import SingleStreamSpec, open_writer

ATTEMPTS = 4
GROUPS = 2
CLOCK = 1_800_000_000.0
WORDS = ("Which is the largest of 18, 5 and 30?", "The answer is", "I think it is", "é 漢字 <b>&amp;</b>")


@dataclass(frozen=True, kw_only=True)
class Story:
    """What happens in the run."""

    steps: int = 12
    seed: int = 0
    kept_in_topic: bool = True
    """Whether topic `actor` still has the rollouts."""
    overrides: tuple[str, ...] = ()
    messages: tuple[TrainerMessage, ...] = ()
    """Further messages of the trainer."""
    finetune: dict[str, Sequence[float]] = field(default_factory=dict)
    """Curves by step that replace the usual ones."""
    actor: dict[str, Sequence[float]] = field(default_factory=dict)
    finished: bool = True
    said: str = ""
    """What the model says in every answer, too."""
    problem: str = ""
    """Of every group, in place of the usual one."""
    numbers: tuple[float, ...] = ()
    """Every rollout's reward, and its metric `odd`, in place of the usual reward."""


def make_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with the marks of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS[:3], trainer)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


USUAL = Story()


def write_config(path: Path, *overrides: str, name: str = "base") -> None:
    """Write the resolved configuration of a run in this folder."""
    required = [f"output_dir={path}", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
    (path / "conf").mkdir()
    config = OmegaConf.create(to_container(compose(name, [*required, *overrides])))
    (path / "conf" / "config.yaml").write_text(OmegaConf.to_yaml(config))


def make_run(path: Path, story: Story = USUAL) -> Path:
    """Writes the folder; returns it."""
    path.mkdir(parents=True, exist_ok=True)
    given = (f"model_path={path / 'model'}", f"finetune.max_train_steps={story.steps}")
    write_config(path, *given, *story.overrides, name="base_cpu")
    (path / "model").mkdir()
    tokenizer = make_tokenizer()
    tokenizer.save(str(path / "model" / "tokenizer.json"))
    rng = np.random.default_rng(story.seed)
    groups = [
        [make_group(rng, tokenizer, step, place, story) for place in range(GROUPS)] for step in range(story.steps)
    ]
    if "streams=redis" in story.overrides:
        (path / "redis_0" / "data").mkdir(parents=True)
    with look_into(path):
        _write_topics(path, groups, story)
    _write_archive(path, groups, rng)
    _write_metrics(path, groups, story)
    return path


def make_group(rng: np.random.Generator, tokenizer: Tokenizer, step: int, place: int, story: Story) -> RolloutGroup:
    """Four attempts at one problem, sampled by the version before the step and the step's own."""
    rollouts = []
    for attempt in range(ATTEMPTS):
        success = bool(rng.random() < (step + 2) / (story.steps + 4))
        prompt = f"<|im_start|>user\n{WORDS[0]} ({step}-{place})<|im_end|>\n<|im_start|>assistant\n"
        answer = f"{WORDS[1 + attempt % 3]} {30 if success else 5}{story.said}<|im_end|>"
        start, ids = len(tokenizer.encode(prompt).ids), tokenizer.encode(prompt + answer).ids
        middle = start + (len(ids) - start) // 2
        spans = [[start, middle, max(step - 1, 0)], [middle, len(ids), step]] if step else [[start, len(ids), 0]]
        sequence = TrainingSequence(
            token_ids=np.array(ids, np.int32),
            logprobs=-rng.random(len(ids) - start, dtype=np.float32),
            spans=np.array(spans, np.int32),
            finish_reason="stop",
        )
        metrics = {"reward": float(success), "success": float(success), "no_error": 1.0, "no_answer": 0.0}
        metrics |= dict(zip(("odd",), story.numbers[1:], strict=False))
        rollouts.append(
            Rollout(
                attempt=attempt,
                reward=story.numbers[0] if story.numbers else float(success),
                sequences=(sequence,),
                metrics=metrics,
                latency_s=0.5,
                num_llm_calls=1,
                servers=("actor_llm_0",),
            )
        )
    position = step * GROUPS + place
    return group_of(
        position,
        rollouts,
        "largest",
        dispatched_version=max(step - 1, 0),
        settled_before=position,
        problem=story.problem or json.dumps({"question": WORDS[0], "gold": 30, "id": position}),
    )


def _write_topics(path: Path, groups: list[list[RolloutGroup]], story: Story) -> None:
    with (
        open_writer(SingleStreamSpec(path, topics.ACTOR), ActorRecord) as actor,
        open_writer(SingleStreamSpec(path, topics.PREPROCESSOR), PreprocessorProgress) as preprocessor,
        open_writer(SingleStreamSpec(path, topics.TRAINER), TrainerMessage) as trainer,
        open_writer(SingleStreamSpec(path, topics.EVALUATION), EvaluationMessage) as evaluation,
        open_writer(SingleStreamSpec(path, topics.ACTOR_TEST), RolloutGroup) as tests,
    ):
        trainer.write(WeightUpdateSuccess(version=0, servers=("actor_llm_0",), pause_ms=(20.0,), timestamp=CLOCK))
        for step, batch in enumerate(groups):
            names = tuple(f"{group.group_id}/{rollout.attempt}" for group in batch for rollout in group.rollouts)
            for group in batch if story.kept_in_topic else ():
                actor.write(group)
            preprocessor.write(
                PreprocessorProgress(
                    samples_packed=len(names) * (step + 1),
                    samples_dropped=0,
                    dropped_by_reason={},
                    step=step + 1,
                    packed_sample_ids=names,
                )
            )
            at = CLOCK + 2.0 * step
            done = SamplesProcessed(samples_processed=len(names) * (step + 1), step=step + 1, timestamp=at + 1)
            trainer.write(done)
            trainer.write(
                WeightUpdateSuccess(version=step + 1, servers=("actor_llm_0",), pause_ms=(5.0,), timestamp=at + 1.5)
            )
            if step % 4 == 0:
                success = (step + 2) / (story.steps + 4)
                evaluation.write(
                    EvaluationDone(version=step, success=success, reward=success, num_rollouts=64, metrics={})
                )
                tests.write(_as_test(batch[0], step))
        for message in story.messages:
            trainer.write(message)
        if story.finished:
            trainer.write(TrainingDone(step=story.steps, timestamp=CLOCK + 2.0 * story.steps))


def _as_test(group: RolloutGroup, version: int) -> RolloutGroup:
    values = {name: getattr(group, name) for name in group.__struct_fields__}
    return RolloutGroup(**(values | {"group_id": f"test-{version}-test-0", "dataset": "test"}))


def _write_archive(path: Path, groups: list[list[RolloutGroup]], rng: np.random.Generator) -> None:
    limits = {"max_bytes": 10**7, "last_steps": 2, "per_step": 4}
    rollouts: StepArchive[ArchivedStep] = StepArchive(path / ARCHIVE_DIR / "preprocessor_0", ArchivedStep, **limits)
    scores: StepArchive[ScoredStep] = StepArchive(path / ARCHIVE_DIR / "finetune_0.rank0", ScoredStep, **limits)
    for step, batch in enumerate(groups):
        everything = [(group, rollout) for group in batch for rollout in group.rollouts]
        flags = flags_of([(rollout, "trained") for _, rollout in everything])
        found = [_archived(group, rollout, own) for (group, rollout), own in zip(everything, flags, strict=True)]
        keep = chosen((rollout.sample_id for rollout in found), 4)
        parts = [[r for r in found if (bool(r.flags) or r.sample_id in keep) is wanted] for wanted in (True, False)]
        records = [ArchivedStep(step=step, rollouts=tuple(part)) for part in parts]
        rollouts.write(step, kept=records[0], rest=records[1])
        scored = [ScoredStep(step=step, sequences=tuple(_scored(r, rng) for r in part)) for part in parts]
        scores.write(step, kept=scored[0], rest=scored[1])


def _archived(group: RolloutGroup, rollout: Rollout, flags: tuple[str, ...]) -> ArchivedRollout:
    mean = float(np.mean([other.reward for other in group.rollouts]))
    return ArchivedRollout(
        group_id=group.group_id,
        domain=group.domain,
        dataset=group.dataset,
        problem=group.problem,
        dispatched_version=group.dispatched_version,
        rollout=rollout,
        advantages=(rollout.reward - mean,),
        flags=flags,
    )


def _scored(rollout: ArchivedRollout, rng: np.random.Generator) -> ScoredSequence:
    (sequence,) = rollout.rollout.sequences
    moved = sequence.logprobs + 0.1 * rng.standard_normal(len(sequence.logprobs)).astype(np.float32)
    return ScoredSequence(
        sequence_id=f"{rollout.sample_id}/0",
        logprobs=moved.astype(np.float32),
        entropy=np.full(len(moved), 0.5, np.float16),
        altered=np.abs(moved - sequence.logprobs) > 0.2,
    )


def _write_metrics(path: Path, groups: list[list[RolloutGroup]], story: Story) -> None:
    (path / "metrics").mkdir()
    lines: dict[str, list[str]] = {"finetune": [], "actor": [], "preprocessor": []}
    for step, batch in enumerate(groups):
        reward = float(np.mean([rollout.reward for group in batch for rollout in group.rollouts]))
        at = CLOCK + 2.0 * step
        finetune = USUAL_FINETUNE | {"reward": reward, "entropy": 1.0 - 0.3 * step / len(groups)}
        actor = USUAL_ACTOR | {"reward": reward, "success": reward, "generating_s": 1.9 * (step + 1), "version": step}
        actor["rollouts"] = 64 * (step + 1)
        finetune |= {name: values[step] for name, values in story.finetune.items()}
        actor |= {name: values[step] for name, values in story.actor.items()}
        lines["finetune"].append(json.dumps({"step": step + 1, "time": at + 1} | finetune | {"live_version": step}))
        lines["actor"].append(json.dumps({"step": step, "time": at} | actor))
        lines["preprocessor"].append(json.dumps({"step": step, "time": at + 0.5} | USUAL_PREPROCESSOR))
    for kind, own in lines.items():
        (path / "metrics" / f"{kind}.jsonl").write_text("\n".join(own) + "\n")


USUAL_FINETUNE = {
    **{"loss": 0.1, "tokens": 64, "ess": 0.97, "clip_fraction": 0.01, "clip_fraction_lag0": 0.0, "kl_k3": 0.002},
    **{"grad_norm": 0.7, "lr": 1e-3, "lag_mean": 0.5, "lag_max": 1.0, "step_s": 1.0, "wait_s": 0.4, "push_wait_s": 0.2},
    **{"tokens_per_s": 64.0, "pause_ms": 5.0, "transfer_ms": 9.0, "kl_ref": 0.0, "logratio_abs_mean": 0.05},
    "logratio_abs_max_lag0": 1e-5,
}
USUAL_ACTOR = {
    **{"tokens_generated_per_s": 70.0, "rollouts_per_s": 4.0, "output_tokens": 8.0, "output_tokens_max": 12},
    **{"cut_by_length": 0.0, "no_answer": 0.0, "no_error": 1.0, "rollouts_under_way": 8},
}
USUAL_PREPROCESSOR = {
    **{
        "survivorship/trained/count": 8,
        "survivorship/trained/mean_tokens": 8.0,
        "survivorship/trained/mean_reward": 0.5,
    },
    **{f"dropped_by_length/{decile}": 0.01 * decile for decile in range(1, 11)},
    **{"tokens": 200, "advantage_std": 0.5, "zero_weight": 0},
}
