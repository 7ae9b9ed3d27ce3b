r"""The trial of right answers: an unpaid form that the prompt asks for is named, and nothing else is."""

from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.math import generate_rollout as math_rollout
from pipelinerl.errors import VerifierError
from pipelinerl.launcher.domain_check import right_answers, try_rollouts
from pipelinerl.launcher.reference_trial import try_references, with_verifiers_here
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult

CFG = OmegaConf.create({"llm": {"parameters": {"max_tokens": 16, "temperature": 1.0}}})
REWARDS = {"correct": 1.0, "wrong": 0.0, "no_answer": 0.0, "unparsable": 0.0, "unfinished": None}
DAPO = (
    "What is 6 * 7? The last line of your response should be of the form Answer: $Answer, where $Answer is the answer."
)
JOB = {"name": "verifier_0", "kind": "verifier", "port": 1, "url": "http://127.0.0.1:9", "hostname": "127.0.0.1"}


def paying(form: str, asked: str) -> Any:
    async def rollout(cfg: Any, llm: Any, problem: dict[str, Any], session: Any) -> RolloutResult:
        call = await llm_async_generate(llm, Prompt.from_user_message(asked), session)
        success = call.output.content == form.format(problem["answer"])
        metrics = BaseMetrics(reward=2.0 if success else -1.0, success=success, no_error=True, no_answer=False)
        return RolloutResult(training_texts=[make_training_text(llm, call)], metrics=metrics, latency=0.0)

    return rollout


@pytest.mark.parametrize(
    ("form", "asked", "is_named"),
    [
        (r"\boxed{{{}}}", DAPO, True),
        (r"\boxed{{{}}}", 'End with "Answer: X".', True),
        ("Answer: {}", DAPO, False),
        (r"\boxed{{{}}}", r"Put it into \boxed{}.", False),
        (r"\boxed{{{}}}", "Question: what is 6 * 7?\nAnswer:", False),
        ("<answer>{}</answer>", "Answer as <answer>number</answer>.", False),
        ("the answer, {}", DAPO, False),  # no known form is paid: nothing shows that `answer` is the answer
    ],
)
async def test_form_that_is_asked_for_and_not_paid_is_named(form: str, asked: str, is_named: bool) -> None:
    said = await right_answers(CFG, paying(form, asked), [{"answer": 42}] * 4)
    if is_named:
        assert said is not None
        assert said.startswith(
            r"right answers as `Answer: …` earn -1, although the prompt asks for that form; as `\boxed{…}` earn 2."
        )
    else:
        assert said is None


async def test_healthy_domain_plays_one_problem_in_the_forms_that_it_asks_for() -> None:
    said: list[str] = []

    async def play(problem: dict[str, Any], reply: Any) -> RolloutResult:
        said.append(reply("Answer as <answer>number</answer>."))
        metrics = BaseMetrics(reward=1.0, success=said[-1] == "<answer>42</answer>", no_error=True, no_answer=False)
        return RolloutResult(training_texts=[], metrics=metrics, latency=0.0)

    assert await try_references(play, [{"answer": 42}] * 4) is None
    assert said == [r"\boxed{42}", "<answer>42</answer>"]


async def test_problems_without_an_answer_and_domains_that_raise_show_nothing() -> None:
    async def raising(*_: Any) -> Any:
        raise VerifierError("down")

    assert await right_answers(CFG, raising, [{"answer": 42}]) is None
    assert await right_answers(CFG, paying(r"\boxed{{{}}}", DAPO), [{"word": "x"}]) is None


async def test_mathematics_is_tried_without_its_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelinerl.domains.verifier_client._clients", {})
    container = with_verifiers_here({"llm": CFG.llm, "jobs": [JOB, {"kind": "actor"}], "rewards": REWARDS})
    cfg = OmegaConf.create(container)
    assert [job.get("url") for job in cfg.jobs] == ["in-process:", None]
    problems = [{"task": DAPO, "answer": "42", "dataset": "train"}]
    await try_rollouts(cfg, math_rollout, problems)
    said = await right_answers(cfg, math_rollout, problems)
    assert said is not None
    assert r"as `Answer: …` earn 0, although" in said
