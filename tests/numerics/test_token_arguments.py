"""A loss that names figures of the tokens: values and gradients against a loop over sequences in float64."""

import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from pipelinerl.config.objectives import TOKEN_ARGUMENTS
from pipelinerl.errors import ConfigError, RecordError
from pipelinerl.finetune.data import Batch, check_record, in_rows, packed, to_batch
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.records import MicroBatch
from tests.models import make_qwen2

PAGE = Path(__file__).resolve().parents[2] / "docs" / "objectives.md"
BLOCK = re.compile(r"^```python\n# (\w+)\.py\n(.*?)^```", re.MULTILINE | re.DOTALL)
VOCAB, STEP = 48, 3
DECAY, VALUE_COEF, LOW, HIGH = 0.9, 0.5, 0.2, 0.28
SEQUENCES = {
    "one turn": (7, [(3, 7)], 1.0, False),
    "cut": (9, [(2, 9)], 0.0, True),
    "two turns": (14, [(2, 5), (8, 10), (10, 13)], -0.5, False),
    "two turns, cut": (12, [(1, 4), (9, 12)], 0.25, True),
    "nothing trained": (4, [], 3.0, True),
    "one token": (3, [(2, 3)], 2.0, False),
}
"""Length, trained spans, reward, whether the server cut the answer."""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in BLOCK.findall(PAGE.read_text()):
        (tmp_path / f"{name}.py").write_text(code)
    (tmp_path / "seen.py").write_text(
        "import torch\nCALLS = []\n"
        "def everything(\n"
        "    logprobs_K, tokens, ref_logprobs, teacher_logprobs, entropy, *, values, segments, rewards, lag\n"
        "):\n"
        "    CALLS.append((ref_logprobs, teacher_logprobs, entropy, values, segments, rewards, lag))\n"
        "    return -logprobs_K * rewards + values.square() - 0.3 * entropy\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def record(names: list[str]) -> MicroBatch:
    rng = np.random.default_rng(5)
    lengths = [SEQUENCES[name][0] for name in names]
    starts = np.cumsum([0, *lengths[:-1]])
    spans = [
        (start + first, start + end, STEP)
        for name, start in zip(names, starts, strict=True)
        for first, end in SEQUENCES[name][1]
    ]
    total = sum(lengths)
    rewards = np.array([SEQUENCES[name][2] for name in names], np.float32)
    trained = np.zeros(total, bool)
    for start, end, _ in spans:
        trained[start:end] = True
    return MicroBatch(
        step=STEP,
        index=0,
        count=1,
        token_ids=rng.integers(0, VOCAB, total).astype(np.int32),
        segment_lengths=np.array(lengths, np.int32),
        segment_weights=np.linspace(0.1, 0.6, len(names)).astype(np.float32),
        spans=np.array(spans, np.int32).reshape(-1, 3),
        logprobs=np.where(trained, -rng.uniform(2.5, 5.0, total), 0).astype(np.float32),
        advantages=(np.repeat(rewards, lengths) * trained).astype(np.float32),
        ref_logprobs=np.where(trained, -rng.uniform(2.5, 5.0, total), 0).astype(np.float32),
        teacher_logprobs=np.where(trained, -rng.uniform(2.5, 5.0, total), 0).astype(np.float32),
        num_samples=len(names),
        num_tokens=int(trained.sum()),
        sequence_ids=tuple(names),
        rewards=rewards,
        cut=np.array([SEQUENCES[name][3] for name in names]),
        next_source=(0, 0),
    )


def make_policy(coef: float = 0.0) -> Policy:
    torch.manual_seed(0)
    lm = make_qwen2(VOCAB, initializer_range=0.2, attn_implementation="sdpa").double().train()
    policy = Policy(lm, chunk=5, value_loss_coef=coef).double()
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    return policy


def batch_of(source: MicroBatch, *, rows: bool = False) -> Batch:
    return to_batch(
        source,
        check_record(source, VOCAB, 0),
        layout=(in_rows if rows else packed)(source.segment_lengths),
        float_dtype=torch.float64,
    )


def sequences(policy: Policy, source: MicroBatch) -> list[dict[str, Any]]:
    """Each sequence by itself: log π, V before each trained token, V after the last one."""
    assert policy.value_head is not None
    found, start = [], 0
    for segment, length in enumerate(source.segment_lengths.tolist()):
        ids = torch.from_numpy(source.token_ids[start : start + length].copy()).long()
        states = policy.lm.model(input_ids=ids[None], use_cache=False)[0][0]
        logs = policy.lm.lm_head(states).log_softmax(-1)
        values = policy.value_head(states)[:, 0]
        at = [
            t for a, b, _ in source.spans.tolist() if start <= a < start + length for t in range(a - start, b - start)
        ]
        found.append(
            {
                "logps": [logs[t - 1, ids[t]] for t in at],
                "entropies": [-(logs[t - 1].exp() * logs[t - 1]).sum() for t in at],
                "values": [values[t - 1] for t in at],
                "after": values[at[-1]].item() if at else 0.0,
                "mu": [float(source.logprobs[start + t]) for t in at],
                "teacher": [float(source.teacher_logprobs[start + t]) for t in at],
                "reward": float(source.rewards[segment]),
                "cut": bool(source.cut[segment]),
                "weight": float(source.segment_weights[segment]),
            }
        )
        start += length
    return found


def oracle_gae(found: dict[str, Any], discount: float, decay: float) -> list[float]:
    """Backwards over the steps, as in the paper's recursion."""
    values = [value.item() for value in found["values"]]
    following = found["after"] if found["cut"] else 0.0
    advantages, running = [], 0.0
    for k in reversed(range(len(values))):
        reward = found["reward"] if k == len(values) - 1 else 0.0
        running = reward + discount * following - values[k] + discount * decay * running
        advantages.insert(0, running)
        following = values[k]
    return advantages


def assert_gradients(policy: Policy, oracle: Policy) -> None:
    for (name, ours), (_, wanted) in zip(policy.named_parameters(), oracle.named_parameters(), strict=True):
        assert wanted.grad is not None, name
        torch.testing.assert_close(
            ours.grad, wanted.grad, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("order", [list(SEQUENCES), list(reversed(SEQUENCES)), ["cut"], ["nothing trained"]])
def test_page_ppo_with_gae_has_the_gradient_of_the_oracle(order: list[str], rows: bool) -> None:
    source, policy, oracle = record(order), make_policy(), make_policy()
    settings = LossSettings(
        policy_loss="my_ppo.ppo_gae", policy_loss_kwargs={"decay": DECAY}, epsilon_low=LOW, epsilon_high=HIGH
    )
    output = policy(batch_of(source, rows=rows), settings)
    output.loss.backward()
    loss = 0 * sum(p.sum() for p in oracle.parameters())
    for found in sequences(oracle, source):
        for k, advantage in enumerate(oracle_gae(found, 1.0, DECAY)):
            ratio = (found["logps"][k] - found["mu"][k]).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            target = advantage + found["values"][k].item()
            loss = loss + found["weight"] * (VALUE_COEF * (found["values"][k] - target) ** 2 - surrogate)
    loss.backward()
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-9, abs=1e-12)
    assert_gradients(policy, oracle)


def test_gae_with_a_discount_is_the_recursion() -> None:
    source, policy = record(list(SEQUENCES)), make_policy()
    found = sequences(policy, source)
    output = policy(batch_of(source), LossSettings(policy_loss="my_ppo.ppo_gae", epsilon_low=LOW, epsilon_high=HIGH))
    from pipelinerl.finetune.rl.corrections import Corrections
    from pipelinerl.finetune.rl.interface import PolicyTokens

    tokens = PolicyTokens(output.logprobs_K, output.inputs, Corrections(), False)
    assert output.inputs.values_K is not None
    assert output.inputs.rewards_K is not None
    advantages_K, returns_K = tokens.gae(output.inputs.values_K, output.inputs.rewards_K, discount=0.8, decay=0.6)
    wanted = [value for sequence in found for value in oracle_gae(sequence, 0.8, 0.6)]
    assert advantages_K.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    before = [value.item() for sequence in found for value in sequence["values"]]
    assert returns_K.tolist() == pytest.approx([a + v for a, v in zip(wanted, before, strict=True)], rel=1e-9)


@pytest.mark.parametrize("chunk", [5, 100])
def test_loss_sees_every_figure_that_it_names(chunk: int) -> None:
    import seen

    source, policy = record(list(SEQUENCES)), make_policy()
    policy.chunk = chunk
    batch = batch_of(source)
    assert batch.inputs.lag_K is not None
    assert batch.inputs.lag_K.tolist() == batch.lags.lag_K.tolist()
    output = policy(batch, LossSettings(policy_loss="seen.everything"))
    output.loss.backward()
    figures = dict(zip(TOKEN_ARGUMENTS, seen.CALLS[-1], strict=True))
    found, oracle = sequences(policy, source), make_policy()
    flat = {name: [v for s in found for v in s[key]] for name, key in (("values", "values"), ("entropy", "entropies"))}
    for name, wanted in flat.items():
        assert figures[name].tolist() == pytest.approx([value.item() for value in wanted], rel=1e-9), name
    assert figures["teacher_logprobs"].tolist() == [value for s in found for value in s["teacher"]]
    assert figures["lag"].tolist() == [0] * len(figures["lag"])
    assert figures["rewards"].tolist() == [s["reward"] for s in found for _ in s["logps"]]
    assert figures["segments"].tolist() == [n for n, s in enumerate(found) for _ in s["logps"]]
    loss = sum(
        s["weight"] * (-s["logps"][k] * s["reward"] + s["values"][k] ** 2 - 0.3 * s["entropies"][k])
        for s in sequences(oracle, source)
        for k in range(len(s["logps"]))
    )
    assert isinstance(loss, Tensor)
    loss.backward()
    assert_gradients(policy, oracle)


def test_page_forks_trains_uncertain_tokens_alone() -> None:
    source, policy, oracle = record(list(SEQUENCES)), make_policy(), make_policy()
    entropies = sorted(value.item() for found in sequences(oracle, source) for value in found["entropies"])
    least = (entropies[8] + entropies[9]) / 2
    settings = LossSettings(policy_loss="my_forks.forks", policy_loss_kwargs={"at_least": least})
    policy(batch_of(source), settings).loss.backward()
    loss = 0 * sum(p.sum() for p in oracle.parameters())
    for found in sequences(oracle, source):
        for k, logp in enumerate(found["logps"]):
            if found["entropies"][k].item() >= least:
                weight = (logp.detach() - found["mu"][k]).exp() * (found["reward"] - found["values"][k].item())
                loss = loss - found["weight"] * weight * logp
    loss.backward()
    assert_gradients(policy, oracle)


@pytest.mark.parametrize("loss", ["reinforce", "ppo"])
def test_teacher_mixed_with_rewards_has_the_gradient_of_the_oracle(loss: str) -> None:
    source, policy, oracle = record(list(SEQUENCES)), make_policy(0.5), make_policy(0.5)
    settings = LossSettings(policy_loss=loss, teacher_coef=0.7, reward_coef=0.3, ratio_clamp=1e9, dual_clip=1e9)
    policy.value_loss_coef = 0.0
    policy(batch_of(source), settings).loss.backward()
    total = 0 * sum(p.sum() for p in oracle.parameters())
    for found in sequences(oracle, source):
        for k, logp in enumerate(found["logps"]):
            reward = found["reward"] - found["values"][k].item()
            advantage = 0.3 * reward + 0.7 * (found["teacher"][k] - logp.item())
            ratio = (logp - found["mu"][k]).exp()
            surrogate = ratio.detach() * advantage * logp
            if loss == "ppo":
                surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            total = total - found["weight"] * surrogate
    total.backward()
    assert_gradients(policy, oracle)


def test_figure_that_nothing_computes_is_refused() -> None:
    source = record(list(SEQUENCES))
    policy = Policy(make_qwen2(VOCAB, attn_implementation="sdpa").double().train(), chunk=5)
    with pytest.raises(ConfigError, match="names 'values', which this run does not compute"):
        policy(batch_of(source), LossSettings(policy_loss="my_ppo.ppo_gae", epsilon_low=LOW, epsilon_high=HIGH))


def with_top(source: MicroBatch, num_top: int) -> MicroBatch:
    """The record with a teacher's ``num_top`` most likely tokens in the place of each trained one."""
    rng, spans = np.random.default_rng(11), source.spans
    teacher_KV = torch.from_numpy(rng.normal(0, 2, (int((spans[:, 1] - spans[:, 0]).sum()), VOCAB))).log_softmax(-1)
    logprobs, ids = teacher_KV.topk(num_top, -1)
    return msgspec.structs.replace(
        source, teacher_top_ids=ids.int().numpy(), teacher_top_logprobs=logprobs.float().numpy()
    )


def coarse_kl(logs_V: Tensor, ids: list[int], teacher: list[float]) -> Tensor:
    """KL of the distribution of the given tokens and of all others as one, from full probabilities."""
    others = [token for token in range(VOCAB) if token not in ids]
    pairs = [(logs_V[token].exp(), np.exp(value)) for token, value in zip(ids, teacher, strict=True)]
    if others:
        pairs.append((logs_V[others].exp().sum(), 1 - sum(float(q) for _, q in pairs)))
    return torch.stack([p * (p / q).log() for p, q in pairs]).sum()


@pytest.mark.parametrize("chunk", [5, 100])
@pytest.mark.parametrize(
    ("loss", "num_top", "temperature"), [("ppo", 8, 1.0), ("gspo", 3, 0.7), ("reinforce", 48, 1.3)]
)
def test_divergence_over_the_teachers_top_tokens_has_the_gradient_of_the_oracle(
    loss: str, num_top: int, temperature: float, chunk: int
) -> None:
    """With rewards beside it, at a temperature, in chunks and at once; 48 tokens are the whole vocabulary."""
    source, policy, oracle = with_top(record(list(SEQUENCES)), num_top), make_policy(0.0), make_policy(0.0)
    source = msgspec.structs.replace(source, cut=None)
    policy.value_head, policy.chunk, policy.temperature = None, chunk, temperature
    settings = LossSettings(policy_loss=loss, teacher_coef=0.7, teacher_top_k=num_top, reward_coef=0.0)
    output = policy(batch_of(source), settings)
    output.loss.backward()
    total, start, k = 0 * sum(p.sum() for p in oracle.parameters()), 0, 0
    for segment, length in enumerate(source.segment_lengths.tolist()):
        ids = torch.from_numpy(source.token_ids[start : start + length].copy()).long()
        logs = (oracle.lm(input_ids=ids[None], use_cache=False).logits[0] / temperature).log_softmax(-1)
        for first, end, _ in source.spans.tolist():
            for t in range(max(first, start), min(end, start + length)):
                ids_J, logs_J = source.teacher_top_ids[k].tolist(), source.teacher_top_logprobs[k].tolist()
                weight = 0.7 * float(source.segment_weights[segment])
                total, k = total + weight * coarse_kl(logs[t - start - 1], ids_J, logs_J), k + 1
        start += length
    total.backward()
    assert k == len(source.teacher_top_ids)
    assert output.loss.item() == pytest.approx(total.item(), rel=1e-6)
    for (name, ours), (_, wanted) in zip(policy.lm.named_parameters(), oracle.lm.named_parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, wanted.grad, rtol=1e-6, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_teachers_top_tokens_beside_rewards_leave_the_rewards_part_as_it_is() -> None:
    source, both, rewards, divergence = record(list(SEQUENCES)), make_policy(), make_policy(), make_policy()
    top = with_top(source, 4)
    given = {"teacher_coef": 0.7, "teacher_top_k": 4}
    for policy, settings, batch in (
        (both, LossSettings(**given, reward_coef=0.25), top),
        (rewards, LossSettings(), msgspec.structs.replace(source, segment_weights=0.25 * source.segment_weights)),
        (divergence, LossSettings(**given, reward_coef=0.0), top),
    ):
        policy.value_loss_coef = 0.0
        policy(batch_of(batch), settings).loss.backward()
    for ours, one, other in zip(both.parameters(), rewards.parameters(), divergence.parameters(), strict=True):
        # Not closer: RMSNorm of a float64 model computes in float32, so gradients add up to its rounding alone.
        torch.testing.assert_close(ours.grad, one.grad + other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("change", ["ids", "shape", "nan", "alone"])
def test_record_whose_top_tokens_are_wrong_is_refused(change: str) -> None:
    source = with_top(record(list(SEQUENCES)), 4)
    ids, logprobs = source.teacher_top_ids.copy(), source.teacher_top_logprobs.copy()
    ids[3, 1] = VOCAB if change == "ids" else ids[3, 1]
    logprobs[2, 0] = np.nan if change == "nan" else logprobs[2, 0]
    wrong = {"ids": ids, "shape": ids[1:], "nan": ids, "alone": None}[change]
    with pytest.raises(RecordError, match="teacher_top"):
        check_record(msgspec.structs.replace(source, teacher_top_ids=wrong, teacher_top_logprobs=logprobs), VOCAB, 0)
