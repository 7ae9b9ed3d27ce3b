"""Random groups through the preprocessor and the trainer's step, against an oracle that knows the documents alone."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.config.sections import Config
from pipelinerl.finetune.accumulate import BatchRules, train_step
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.rl.objective import settings_at
from pipelinerl.preprocess import reference
from pipelinerl.preprocess.reference import Scores
from pipelinerl.records import (
    DataOrder,
    MicroBatch,
    OrderResumed,
    Rollout,
    RolloutGroup,
    TrainerMessage,
    TrainingResumed,
    TrainingSequence,
    topics,
)
from pipelinerl.records.prefixes import MIN_SHARED
from pipelinerl.streams import SingleStreamSpec, open_writer
from tests.memory_streams import MemoryBackend
from tests.models import make_qwen2
from tests.oracle import OraclePolicy, Step, step_of
from tests.oracle_batches import Member, batches_of
from tests.preprocess_kit import (
    VOCAB,
    consumed,
    make_context,
    make_group,
    make_world,
    prepare_run,
    preprocessor,
    read_topic,
    turn_until,
    write_groups,
)

FIRST_STEP = 6
"""The run was resumed here, so that tokens have a lag of up to seven steps."""
LAST_STEP = 7
LEARNING_RATE = 1e-2
TOLERANCE = 1e-5
"""Records hold advantages, weights and log μ in float32, and so are ratios."""
LOSSES = {
    "reinforce": ["policy_loss=reinforce"],
    "ppo": ["policy_loss=ppo"],
    "gspo": ["policy_loss=gspo"],
    "decoupled_ppo": ["policy_loss=decoupled_ppo", "proximal_every=2"],
    "ppo, proximal": ["policy_loss=ppo", "proximal_every=2"],
    "gspo, proximal": ["policy_loss=gspo", "proximal_every=3"],
    "ppo, own": ["policy_loss=decoupled_ppo", "proximal_every=1"],
}
ADVANTAGES = ["loo", "group_mean", "group_std", "batch_std", "value"]
AGGREGATIONS = ["sum_over_batch", "token_mean", "sample_mean", "prompt_mean"]
TRUNCATIONS = [["token_tis=1.5"], ["sequence_tis=2"], ["token_tis=1.5", "sequence_mis=3"]]
MASKS = [
    [],
    ["token_mis=1.5"],
    ["token_mis=1.5", "token_mis_low=0.7"],
    ["sequence_mis=3"],
    ["veto=0.4"],
    ["token_mis=2", "sequence_mis=3", "veto=0.3"],
]
MODES = ["rollout", "texts", "steps"]
NUM_PAIRS = len(LOSSES) * len(ADVANTAGES)


@dataclass(frozen=True)
class Case:
    """One run of two optimizer steps."""

    seed: int
    overrides: tuple[str, ...]
    mode: str = "rollout"
    attempts: int = 4
    ranks: int = 1
    layout: Any = "cheaper"
    fewest: int = 1
    tokens: int = 8
    """Fewest and most tokens of a completion."""
    groups: int = 8


def random_case(seed: int) -> Case:
    """Losses and advantages in turn, so that 35 cases have every pair. The rest by chance."""
    rng = np.random.default_rng(seed)
    names = list(LOSSES)
    loss, advantage = names[seed % len(names)], ADVANTAGES[seed % len(ADVANTAGES)]
    corrections = [*MASKS] if loss in ("ppo", "gspo") else [*MASKS, *TRUNCATIONS]
    rl = [*LOSSES[loss], f"advantage={advantage}", f"aggregation={rng.choice(AGGREGATIONS)}"]
    chosen = corrections[rng.integers(len(corrections))]
    rl += chosen
    if advantage == "value":
        rl.append("value_loss_coef=0.3")
    if rng.random() < 0.5:
        rl += ["kl_coef=0.2", "final_kl_coef=0.05", "kl_clamp=2"]
    if rng.random() < 0.5:
        rl += ["entropy_bonus=0.01", "final_entropy_bonus=0.1"]
    if loss == "reinforce" and not any("mis" in name for name in chosen) and rng.random() < 0.7:
        rl.append("ratio_clamp=1.3")
    attempts, batch = int(rng.integers(2, 6)), int(rng.integers(3, 7))
    overrides = [f"finetune.rl.{key}" for key in rl]
    overrides += [f"llm.parameters.temperature={rng.choice([0.7, 1.0, 1.4])}", f"attempts={attempts}"]
    overrides += [f"finetune.gradient_accumulation_passes={batch}", f"finetune.seq_length={rng.choice([64, 100, 400])}"]
    overrides.append(f"finetune.rl.step_discount={rng.choice([1.0, 0.5])}")
    if rng.random() < 0.3:
        overrides.append("preprocess.overlong_filtering=true")
    if rng.random() < 0.3:
        overrides += ["preprocess.overlong_buffer_tokens=4", "llm.parameters.max_tokens=8"]
    if rng.random() < 0.3 and advantage != "value":
        overrides.append("preprocess.filter_zero_advantage_groups=true")
    if rng.random() < 0.3:
        overrides += ["max_lag_steps=4", f"preprocess.lag_drop={rng.choice(['rollout', 'token', 'never'])}"]
    return Case(
        seed,
        tuple(overrides),
        mode=str(rng.choice(MODES)),
        attempts=attempts,
        ranks=int(rng.choice([1, 2, 4])),
        layout=str(rng.choice(["packed", "rows", "cheaper"])),
        groups=(9 if "max_lag_steps=4" in overrides else 4) * batch // attempts + 2,
    )


class Groups:
    """Random groups, with log-probabilities near those of a policy."""

    def __init__(self, case: Case, policy: OraclePolicy):
        self.case, self.policy, self.rng = case, policy, np.random.default_rng(1000 + case.seed)
        self.reference: dict[bytes, np.ndarray] = {}

    def group(self, position: int) -> RolloutGroup:
        rewards = self.rng.integers(-2, 5, (self.case.attempts, 4)) / 4
        self.prompt = self.rng.integers(0, VOCAB, self.rng.choice([0, MIN_SHARED, MIN_SHARED + 4])).astype(np.int32)
        if self.rng.random() < 0.2:
            rewards[:] = 0.5
        rollouts = tuple(self.rollout(attempt, rewards[attempt]) for attempt in range(self.case.attempts))
        group = make_group(self.rng, position, version=0)
        return msgspec.structs.replace(group, rollouts=rollouts, attempts=self.case.attempts)

    def rollout(self, attempt: int, rewards: np.ndarray) -> Rollout:
        mode: Any = self.case.mode
        turns = int(self.rng.integers(1, 4))
        starts = [turn for turn in range(turns) if turn == 0 or mode != "rollout" or self.rng.random() < 0.3]
        ends = [*starts[1:], turns]
        sequences = [self.sequence(turn, end - turn) for turn, end in zip(starts, ends, strict=True)]
        if mode != "rollout" and turns > 2 and self.rng.random() < 0.3:
            del sequences[1]
        return Rollout(
            attempt=attempt,
            reward=float(rewards[0]),
            sequences=tuple(sequences),
            metrics={},
            latency_s=0.0,
            num_llm_calls=turns,
            rewards=mode,
            text_rewards=() if mode == "rollout" else tuple(rewards[:turns].tolist()),
        )

    def sequence(self, turn: int, turns: int) -> TrainingSequence:
        """The group's prompt, then ``turns`` prompts and completions, each sampled by up to three versions."""
        spans, end, version = [], len(self.prompt), int(self.rng.integers(0, FIRST_STEP + 1))
        for _ in range(turns):
            end += int(self.rng.integers(1, 4))
            cuts = self.rng.integers(self.case.fewest, self.case.tokens + 1, self.rng.integers(1, 4))
            for length in np.diff([0, *sorted(cuts)]):
                version = min(version + int(self.rng.integers(0, 2)), FIRST_STEP)
                if length:
                    spans.append((end, end + int(length), version))
                    end += int(length)
        ids = np.append(self.prompt, self.rng.integers(0, VOCAB, end - len(self.prompt)).astype(np.int32))
        self.reference[ids.tobytes()] = np.log(1 / VOCAB) + self.rng.normal(0, 1, end).astype(np.float32)
        sequence = TrainingSequence(
            token_ids=ids,
            logprobs=np.zeros(0, np.float32),
            spans=np.array(spans, np.int32),
            finish_reason=str(self.rng.choice(["stop", "length", "tool_calls"], p=[0.7, 0.1, 0.2])),
            turn=turn,
        )
        known = self.policy.logprobs(ids, [p for start, stop, _ in spans for p in range(start, stop)])
        noise = self.rng.normal(0, self.rng.choice([0, 0.05, 0.3, 1.0]), len(known))
        return msgspec.structs.replace(sequence, logprobs=np.minimum(known + noise, -1e-3).astype(np.float32))

    def known(self, token_ids: np.ndarray) -> list[float]:
        return self.reference[token_ids.tobytes()].tolist()

    async def score(self, session: Any, url: str, sequences: list[np.ndarray], **images: Any) -> list[Scores]:
        """As `reference.score_sequences`."""
        return [Scores(self.reference[sequence.tobytes()]) for sequence in sequences]


class RecordingEngine(ReplicatedEngine):
    """Keeps the gradient of the newest step."""

    def step(self, learning_rate: float) -> float:
        self.gradient = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in self.trained.items()
        }
        return super().step(learning_rate)


class Later:
    """The micro-batches of all steps, as `ProximalPolicy` reads those of later steps."""

    def __init__(self, records: dict[int, list[MicroBatch]]):
        self.records = records

    def peek(self, step: int) -> list[MicroBatch]:
        return self.records[step]


def make_engine(case: Case, cfg: Config) -> RecordingEngine:
    rl = cfg.finetune.rl
    lm = make_qwen2(VOCAB, layers=1, initializer_range=0.3, max_position_embeddings=5000).double()
    if case.layout == "packed":
        register_attention(PACKED, packed_attention)
        lm.set_attn_implementation(PACKED)
    coef = rl.value_loss_coef if rl.advantage == "value" else None
    policy = Policy(lm, temperature=cfg.llm.temperature, chunk=7, value_loss_coef=coef)
    if policy.value_head is not None:
        torch.nn.init.normal_(policy.value_head.weight, std=0.1)
    return RecordingEngine(policy, cfg, torch.device("cpu"))


def oracle_policy(engine: RecordingEngine) -> OraclePolicy:
    """The engine's policy now, in a model of its own."""
    lm = make_qwen2(VOCAB, layers=1, max_position_embeddings=5000, attn_implementation="eager").double()
    lm.load_state_dict(engine.policy.lm.state_dict())
    return OraclePolicy(lm, copy.deepcopy(engine.policy.value_head), engine.policy.temperature)


def preprocessed(run_dir: Path, case: Case, ctx: Any, groups: Sequence[RolloutGroup]) -> dict[int, list[MicroBatch]]:
    """The micro-batches of all ranks by step: a step's gradient is the sum over all of them."""
    resumed = OrderResumed(step=FIRST_STEP, order=DataOrder(), published=0)
    write_groups(run_dir, [resumed, *groups])
    with open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as trainer:
        trainer.write(TrainingResumed(step=FIRST_STEP, repeated=0, samples_processed=0))
    with preprocessor(ctx) as role:
        turn_until(role, consumed(role, len(groups) + 1))
    found: dict[int, list[MicroBatch]] = {}
    for rank in range(case.ranks):
        for record in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch, partition=rank):
            found.setdefault(record.step, []).append(record)
    return found


def deviations(
    engine: RecordingEngine, metrics: dict[Any, float], policy: OraclePolicy, expected: Step
) -> dict[str, float]:
    """Of the gradient in units of its largest entry, of each metric in units of its size or 1."""
    expected.loss.backward()
    parts = {"lm": policy.lm} if policy.value_head is None else {"lm": policy.lm, "value_head": policy.value_head}
    wanted: dict[str, Any] = {f"{key}.{name}": p.grad for key in parts for name, p in parts[key].named_parameters()}
    size = max(float(g.abs().max()) for g in wanted.values()) + 1e-9
    found = {"gradient": max(float((engine.gradient[n] - g).abs().max()) for n, g in wanted.items()) / size}
    norm = sum(float(g.square().sum()) for g in wanted.values()) ** 0.5
    for name, value in (expected.metrics | {"grad_norm": norm}).items():
        found[name] = abs(metrics.get(name, float("nan")) - value) / max(abs(value), 1.0)
    return found


def run(case: Case, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """Deviations of each step."""
    run_dir.mkdir(exist_ok=True)
    prepare_run(MemoryBackend(), run_dir, monkeypatch)
    world = make_world(ranks=case.ranks, reference_servers=1)
    steps = [f"finetune.max_train_steps={LAST_STEP + 1}", "max_lag_steps=null", "world.preprocessor_fraction=1"]
    ctx = make_context(run_dir, world, *steps, "finetune.dtype=float32", *case.overrides)
    engine = make_engine(case, ctx.cfg)
    made = Groups(case, oracle_policy(engine))
    monkeypatch.setattr(reference, "score_sequences", made.score)
    groups = [made.group(position) for position in range(case.groups)]
    records, batches = preprocessed(run_dir, case, ctx, groups), batches_of(groups, ctx.cfg, FIRST_STEP)
    assert sorted(records) == sorted(batches)
    return list(train(case, ctx.cfg, engine, records, batches, made))


def train(
    case: Case,
    cfg: Config,
    engine: RecordingEngine,
    records: dict[int, list[MicroBatch]],
    batches: dict[int, list[Member]],
    made: Groups,
) -> Iterator[dict[str, float]]:
    rules = BatchRules(
        vocab_size=VOCAB,
        max_lag_steps=cfg.token_lag_bound,
        layout=case.layout,
        tokens_per_attention_unit=0,
        float_dtype=torch.float64,
        share_prefixes=case.layout == "packed",
    )
    proximal = ProximalPolicy(cfg.proximal_steps, LAST_STEP + 1)
    shared = oracle_policy(engine) if cfg.proximal_steps else None
    known = made.known if cfg.finetune.rl.kl_coef else None
    for step in range(FIRST_STEP, LAST_STEP + 1):
        policy = oracle_policy(engine)
        if cfg.proximal_steps and step % cfg.proximal_steps == 0:
            shared = policy
        logprobs = proximal.of_step(step, records[step], cast(BatchReader, Later(records)), engine, rules)
        metrics = train_step(engine, records[step], settings_at(cfg, step), rules, LEARNING_RATE, logprobs)
        expected = step_of(batches[step], policy, cfg, step, shared, known)
        yield deviations(engine, metrics, policy, expected)


def disagreements(case: Case, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    found = run(case, run_dir, monkeypatch)
    large = [{name: value for name, value in step.items() if not value <= TOLERANCE} for step in found]
    return [step for step in large if step]


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_step_agrees_with_the_oracle(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not disagreements(random_case(seed), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_many_steps_agree_with_the_oracle(loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """300 cases."""
    first = NUM_PAIRS + list(LOSSES).index(loss)
    for seed in range(first, NUM_PAIRS + 301, len(LOSSES)):
        case = random_case(seed)
        assert not disagreements(case, tmp_path / str(seed), monkeypatch), case


def test_group_of_64_attempts_that_a_batch_cuts_agrees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rl = ["advantage=batch_std", "aggregation=prompt_mean", "token_tis=1.5", "sequence_mis=3", "entropy_bonus=0.1"]
    batch = ["attempts=64", "finetune.gradient_accumulation_passes=50", "finetune.seq_length=200"]
    overrides = (*(f"finetune.rl.{key}" for key in rl), *batch, "preprocess.overlong_filtering=true")
    case = Case(1, overrides, mode="steps", attempts=64, ranks=4, tokens=3, groups=2)
    assert not disagreements(case, tmp_path, monkeypatch)


def test_sequences_of_thousands_of_tokens_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rl = ["policy_loss=gspo", "aggregation=token_mean", "advantage=group_std", "kl_coef=0.1", "kl_clamp=2"]
    batch = ["attempts=2", "finetune.gradient_accumulation_passes=1", "finetune.seq_length=5000"]
    overrides = (*(f"finetune.rl.{key}" for key in rl), *batch)
    case = Case(2, overrides, mode="texts", attempts=2, fewest=2000, tokens=2100, layout="packed", groups=1)
    assert not disagreements(case, tmp_path, monkeypatch)
