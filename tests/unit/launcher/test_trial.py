"""The scripted model finds what would fail in the run, and only that."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import ConfigDict

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.chat.images import placeholder_id
from pipelinerl.domains.largest import generate_rollout
from pipelinerl.errors import DomainError, TransportError, VerifierError
from pipelinerl.launcher.domain_check import (
    TrialFailure,
    check_data_sets,
    scripted_llm,
    try_rollouts,
)
from pipelinerl.launcher.trial_tokenizer import ByteTokenizer
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import byte_tokenizer, save_tokenizer
from tests import pictures
from tests.says import says

CFG = OmegaConf.create({"llm": {"parameters": {"max_tokens": 16, "temperature": 1.0}}})
PROBLEMS = [{"question": "Which?", "answer": 1, "dataset": "train"}] * 4


async def test_trial_largest_domain_passes() -> None:
    await try_rollouts(CFG, generate_rollout, PROBLEMS)


async def test_trial_multi_turn_conversation_extends() -> None:
    async def two_turns(cfg: Any, llm: Any, problem: dict, session: Any) -> RolloutResult:
        messages = [{"role": "user", "content": problem["question"]}]
        texts = []
        for _ in range(2):
            call = await llm_async_generate(llm, Prompt(messages=messages), session)
            texts.append(make_training_text(llm, call))
            messages = [*messages, call.output.to_message(), {"role": "user", "content": "again"}]
        metrics = BaseMetrics(reward=0.0, success=False, no_error=True, no_answer=False)
        return RolloutResult(training_texts=texts, metrics=metrics, latency=0.0)

    await try_rollouts(CFG, two_turns, PROBLEMS)


async def failure_of(rollout: Any, problems: list[dict] = PROBLEMS) -> TrialFailure:
    with pytest.raises(TrialFailure) as caught:
        await try_rollouts(CFG, rollout, problems)
    return caught.value


async def test_trial_missing_key_is_certain_and_names_both_sides() -> None:
    failure = await failure_of(generate_rollout, [{"prompt": "x"}])
    assert failure.certain
    assert re.search(says("needs 'question'", "has ['prompt']"), str(failure))


async def test_trial_same_error_everywhere_is_certain() -> None:
    async def broken(cfg: Any, llm: Any, problem: dict, session: Any) -> None:
        raise ValueError("always")

    failure = await failure_of(broken)
    assert failure.certain
    assert str(failure).startswith("raises on every rollout: ValueError: always (")


def test_data_sets_whose_metrics_would_be_others_are_refused() -> None:
    check_data_sets("a.load", [{"dataset": "eval"}, {"dataset": "eval"}])
    check_data_sets("a.load", [{"dataset": "openai/gsm8k:main@train"}, {"dataset": "evals/x"}, {"dataset": "/eval/x"}])
    for name in ("eval", "eval/x.jsonl", "mix/x", ""):
        with pytest.raises(DomainError, match=says("a.load", "dataset", repr(name))):
            check_data_sets("a.load", [{"dataset": "other"}, {"dataset": name}])


@pytest.mark.parametrize("name", ["step", "version", "reward_max", "format/ok"])
async def test_trial_metric_that_would_take_anothers_place_is_refused(name: str) -> None:
    class Metrics(BaseMetrics):
        model_config = ConfigDict(extra="allow")

    async def reporting(cfg: Any, llm: Any, problem: dict, session: Any) -> RolloutResult:
        text = make_training_text(llm, await llm_async_generate(llm, Prompt.from_user_message("?"), session))
        metrics = Metrics(reward=0.0, success=False, no_error=True, no_answer=False, **{name: 1.0})
        return RolloutResult(training_texts=[text], metrics=metrics, latency=0.0)

    failure = await failure_of(reporting)
    assert failure.certain
    assert re.search(says(f"metric '{name}'", "rename"), str(failure))


@pytest.mark.parametrize(
    "error", [TransportError("x"), VerifierError("x"), ConnectionRefusedError("x"), TimeoutError("x")]
)
async def test_trial_missing_services_prove_nothing(error: Exception) -> None:
    async def needs_service(cfg: Any, llm: Any, problem: dict, session: Any) -> None:
        try:
            raise error
        except type(error) as cause:
            raise RuntimeError("no judge") from cause

    assert not (await failure_of(needs_service)).certain


async def test_trial_error_on_some_answers_only_is_the_domains_own_business() -> None:
    async def picky(cfg: Any, llm: Any, problem: dict, session: Any) -> RolloutResult:
        call = await llm_async_generate(llm, Prompt.from_user_message("?"), session)
        if not call.output.content:
            raise ValueError("empty")
        return await generate_rollout(cfg, llm, problem, session)

    await try_rollouts(CFG, picky, PROBLEMS)


async def test_trial_limits_of_the_scripted_tokenizer_prove_nothing() -> None:
    async def counts(cfg: Any, llm: Any, problem: dict, session: Any) -> None:
        llm.tokenizer.convert_ids_to_tokens([1])

    assert not (await failure_of(counts)).certain


async def test_trial_wrong_return_is_certain() -> None:
    async def number(cfg: Any, llm: Any, problem: dict, session: Any) -> float:
        return 1.0

    assert re.search(says("float", "pipelinerl.rollouts.RolloutResult"), str(await failure_of(number)))


async def test_trial_named_reward_that_the_domain_does_not_report_is_certain() -> None:
    def cfg(names: list[str], rewards: str = "rollout") -> Any:
        weights = dict.fromkeys(names, 1.0)
        return OmegaConf.merge(CFG, {"actor": {"rewards": rewards}, "finetune": {"rl": {"reward_weights": weights}}})

    await try_rollouts(cfg(["success", "no_answer"]), generate_rollout, PROBLEMS)
    for given, words in (
        (cfg(["style"]), ("'style'", "no_answer", "success")),
        (cfg(["success"], "texts"), ("texts",)),
    ):
        with pytest.raises(TrialFailure, match=says("finetune.rl.reward_weights", *words)) as refused:
            await try_rollouts(given, generate_rollout, PROBLEMS)
        assert refused.value.certain


async def test_trial_slow_rollout_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def slow(cfg: Any, llm: Any, problem: dict, session: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr("pipelinerl.launcher.domain_check.ROLLOUT_TIMEOUT_S", 0.01)
    assert not (await failure_of(slow)).certain


def test_byte_tokenizer_round_trips_and_bounds_are_kept() -> None:
    backend = ByteTokenizer().backend_tokenizer
    assert backend.decode(backend.encode("5 > ä").ids) == "5 > ä"
    assert scripted_llm(CFG, "x").parameters == {"max_tokens": 16, "temperature": 1.0}


ASKED = [{"role": "user", "content": "a"}]
USES = {
    "call": lambda tokenizer: tokenizer("ab").input_ids == tokenizer.encode("ab"),
    "len": lambda tokenizer: len(tokenizer) == max(tokenizer.get_vocab().values()) + 1,
    "in": lambda tokenizer: "<|im_end|>" in tokenizer.get_vocab(),
    "cut": lambda tokenizer: tokenizer.decode(tokenizer.encode("abc")[:2]) == "ab",
    "chat": lambda tokenizer: len(tokenizer.apply_chat_template(ASKED)["input_ids"]) > 1,
    "several": lambda tokenizer: len(tokenizer.apply_chat_template(conversation=[ASKED] * 2, tokenize=False)) == 2,
    "copy": lambda tokenizer: copy.deepcopy(tokenizer).decode(tokenizer.encode("abc")) == "abc",
}


@pytest.mark.parametrize("use", USES)
async def test_trial_domain_that_calls_the_tokenizer_gets_the_models_own(
    use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.llm._TOKENIZERS", {})

    async def counts(cfg: Any, llm: Any, problem: dict, session: Any) -> RolloutResult:
        assert USES[use](llm.tokenizer)
        return await generate_rollout(cfg, llm, problem, session)

    cfg = OmegaConf.merge(CFG, {"model_path": str(save_tokenizer(tmp_path))})
    await try_rollouts(cfg, counts, PROBLEMS)
    assert not (await failure_of(counts)).certain  # no model is here: nothing is known


async def test_trial_with_a_tokenizer_without_an_end_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.llm._TOKENIZERS", {})
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    cfg = OmegaConf.create({"llm": {"parameters": {"max_tokens": 64}}, "model_path": str(tmp_path)})
    save_tokenizer(tmp_path, tokenizer)
    await try_rollouts(cfg, generate_rollout, PROBLEMS)


async def test_trial_plays_a_domain_of_images_if_the_model_takes_them(tmp_path: Path) -> None:
    problems = pictures.load_problems(["train"])
    cfg = OmegaConf.merge(CFG, {"model_path": str(tmp_path)})
    with pytest.raises(TrialFailure, match="could not be tried"):  # no model is here yet
        await try_rollouts(cfg, pictures.generate_rollout, problems)
    placeholder_id.cache_clear()
    (tmp_path / "config.json").write_text('{"image_token_id": 257}')
    await try_rollouts(cfg, pictures.generate_rollout, problems)
    placeholder_id.cache_clear()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TrialFailure, match=says("raises on every rollout", "no `image_token_id`")) as caught:
        await try_rollouts(cfg, pictures.generate_rollout, problems)
    assert caught.value.certain
    placeholder_id.cache_clear()
