"""What a rollout function returns is checked by field, in a domain's own tests as in the actor."""

import contextlib
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from pydantic import ConfigDict

from pipelinerl.actor.sequences import SequenceTooLong
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import DomainError, PipelineRLError, RecordError, TransportError
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult, finite, numeric_metrics
from pipelinerl.testing import run_rollout
from tests.says import says


def returning(change: Any) -> Any:
    """A rollout function whose right result is changed."""

    async def rollout(cfg: Any, llm: Any, problem: Any, session: Any) -> Any:
        call = await llm_call(llm, session)
        text = make_training_text(llm, call)
        text.reward = 1.0
        metrics = BaseMetrics(reward=1.0, success=True, no_error=True, no_answer=False)
        result = RolloutResult(training_texts=[text], metrics=metrics, latency=0.1)
        return change(result)

    return rollout


async def llm_call(llm: Any, session: Any) -> Any:
    return await llm_async_generate(llm, Prompt(messages=[{"role": "user", "content": "?"}]), session)


def with_reward(value: Any) -> Any:
    def change(result: RolloutResult) -> RolloutResult:
        result.training_texts[0].reward = value
        return result

    return change


def with_metric(value: Any) -> Any:
    def change(result: RolloutResult) -> RolloutResult:
        result.metrics.reward = value
        return result

    return change


def masked(result: RolloutResult) -> RolloutResult:
    text = result.training_texts[0]
    text.labels = [-100] * len(text.labels)
    return result


def without_a_label(result: RolloutResult) -> RolloutResult:
    text = result.training_texts[0]
    text.labels = text.labels[:-1]
    return result


def without_texts(result: RolloutResult) -> RolloutResult:
    result.training_texts = []
    return result


async def test_run_rollout_returns_a_right_result() -> None:
    result = await run_rollout(returning(lambda result: result), {}, ["yes"])
    assert result.training_texts[0].reward == 1.0


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda result: None, DomainError, "it returned NoneType: it must return a pipelinerl.rollouts.RolloutResult"),
        (lambda result: {"reward": 1}, DomainError, "it returned dict"),
        (with_reward(None), RecordError, r"training_texts\[0\].reward is None: it must be a finite number"),
        (with_reward(math.nan), RecordError, r"training_texts\[0\].reward is nan"),
        (with_reward("1.0"), RecordError, r"training_texts\[0\].reward is '1.0'"),
        (with_metric(None), RecordError, "metrics.reward is None"),
        (with_metric(math.inf), RecordError, "metrics.reward is inf"),
        (with_metric(10**400), RecordError, "metrics.reward is 1000"),
        (with_metric(10**5000), RecordError, r"metrics.reward is of more digits than Python writes \(int\)"),
        (with_metric(1e300), RecordError, r"metrics.reward is 1e\+300: it must be a finite number within ±1e\+15"),
        (with_metric(-1.1e15), RecordError, "metrics.reward is -1100000000000000.0"),
        (with_metric(np.float32(1e30)), RecordError, "metrics.reward is "),
        (with_metric(Decimal("1e16")), RecordError, "metrics.reward is Decimal"),
        (with_metric(Decimal("sNaN")), RecordError, "metrics.reward is Decimal"),
        (with_metric(Fraction(10**400, 3)), RecordError, "metrics.reward is Fraction"),
        (with_metric(np.array([1.0, 2.0])), RecordError, "metrics.reward is array"),
        (with_reward(1e16), RecordError, r"training_texts\[0\].reward is 1e\+16"),
        (with_reward(-(10**16)), RecordError, r"training_texts\[0\].reward is -1"),
        (without_texts, RecordError, "training_texts is empty"),
        (masked, RecordError, "no training text has a sampled token to train on: labels of -100"),
        (without_a_label, RecordError, "labels"),
    ],
)
async def test_run_rollout_refuses_what_the_actor_refuses(
    change: Any, kind: type[PipelineRLError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await run_rollout(returning(change), {}, ["yes"])


@pytest.mark.parametrize(
    ("finetune", "kind", "message"),
    [
        ({"seq_length": 4}, SequenceTooLong, "finetune.seq_length is 4"),
        ({"rl": {"reward_weights": {"format": 1.0}}}, RecordError, "names 'format', which the rollout does not report"),
    ],
)
async def test_run_rollout_refuses_what_the_actor_refuses_with_that_configuration(
    finetune: dict, kind: type[PipelineRLError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await run_rollout(returning(lambda result: result), {}, ["yes"], cfg={"finetune": finetune})


async def test_run_rollout_raises_a_servers_error_that_the_function_caught() -> None:
    """As in a run: what the domain returns without the answer is no rollout."""

    async def fallback(cfg: Any, llm: Any, problem: Any, session: Any) -> Any:
        with contextlib.suppress(TransportError):
            await llm_call(llm, session)
        return RolloutResult(
            training_texts=[], metrics=BaseMetrics(reward=0, success=0, no_error=0, no_answer=1), latency=0.0
        )

    def refuse(prompt: str) -> str:
        raise TransportError("no answer")

    with pytest.raises(TransportError, match="no answer"):
        await run_rollout(fallback, {}, refuse)


@pytest.mark.parametrize("value", [1e300, -1e16, 10**400, np.float64(2e15), np.int64(2**62), np.nan])
def test_numeric_metrics_of_any_type_are_refused_beyond_the_bound(value: Any) -> None:
    class Metrics(BaseMetrics):
        model_config = ConfigDict(extra="allow")

    metrics = Metrics(reward=1, success=True, no_error=True, no_answer=False, **{"length": value})
    with pytest.raises(RecordError, match=r"metrics.length is "):
        numeric_metrics(RolloutResult(training_texts=[], metrics=metrics, latency=0.0))


@pytest.mark.parametrize("value", [1e15, -1e15, 10**15, np.float32(-9e14), True, Decimal("-1e15"), 0, -0.0, 5e-324])
def test_numbers_up_to_the_bound_are_taken(value: Any) -> None:
    assert finite("x", value) == float(value)


def test_numeric_metrics_are_numbers_of_every_type() -> None:
    class Metrics(BaseMetrics):
        model_config = ConfigDict(extra="allow")

    given = {"of_numpy": np.bool_(True), "half": np.float32(0.5), "note": "text", "nothing": None}
    metrics = Metrics(reward=1, success=True, no_error=True, no_answer=False, **given)
    found = numeric_metrics(RolloutResult(training_texts=[], metrics=metrics, latency=0.0))
    assert found == {"reward": 1, "success": 1, "no_error": 1, "no_answer": 0, "of_numpy": 1, "half": 0.5}


async def test_run_rollout_knows_the_mode_of_the_rewards() -> None:
    def unset(result: RolloutResult) -> RolloutResult:
        result.training_texts[0].model_fields_set.discard("reward")
        return result

    with pytest.raises(RecordError, match=says("not set", "rewards='texts'")):
        await run_rollout(returning(unset), {}, ["yes"], cfg={"actor": {"rewards": "texts"}})
