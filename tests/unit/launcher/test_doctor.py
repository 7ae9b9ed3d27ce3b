"""Domains with one mistake each: the doctor names it, and says nothing of the same domain without one."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import OmegaConf

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.inspect import finding as finding_of
from pipelinerl.launcher.doctor.__main__ import main
from pipelinerl.launcher.doctor.findings import DOMAIN, Observation, Seen, copying_rule, slow
from pipelinerl.launcher.doctor.play import Stage, affordable, examine
from pipelinerl.launcher.doctor.policies import candidates, hidden_fields
from pipelinerl.llm import Prompt
from pipelinerl.rollouts import BaseMetrics, RolloutResult, TrainingText

Problem = dict[str, Any]
CFG = OmegaConf.create({"llm": {"parameters": {"max_tokens": 64}}, "actor": {"rewards": "rollout"}})
OUTAGE_REWARD = -1.0


def asked(problem: Problem) -> str:
    return f"What is {problem['a']} + {problem['b']}? Answer as <sum>number</sum>."


def judged(said: str, problem: Problem) -> tuple[float, bool]:
    match = re.fullmatch(r"<sum>(\d+)</sum>.*", said, re.ASCII | re.DOTALL)
    success = match is not None and int(match[1]) == problem["sum"]
    return (-0.5 if match is None else float(success)), success


def domain(
    ask: Callable[[Problem], str] = asked,
    judge: Callable[[str, Problem], tuple[float, bool]] = judged,
    swallow: bool = False,
) -> Callable[..., Any]:
    async def generate_rollout(cfg: Any, llm: Any, problem: Problem, session: Any) -> RolloutResult:
        prompt = Prompt(messages=[{"role": "user", "content": ask(problem)}])
        try:
            call = await llm_async_generate(llm, prompt, session)
        except Exception:
            if not swallow:
                raise
            metrics = BaseMetrics(reward=OUTAGE_REWARD, success=False, no_error=False, no_answer=True)
            lost = TrainingText(
                text="", n_predicted=1, reward=OUTAGE_REWARD, input_ids=[5, 6], labels=[-100, 6], logprobs=[-1.0]
            )
            return RolloutResult(training_texts=[lost], metrics=metrics, latency=0.0)
        reward, success = judge(call.output.content or "", problem)
        text = make_training_text(llm, call)
        text.reward = reward
        metrics = BaseMetrics(reward=reward, success=success, no_error=True, no_answer=False)
        return RolloutResult(training_texts=[text], metrics=metrics, latency=0.0)

    return generate_rollout


def problems(seed: int, count: int = 60) -> list[Problem]:
    random = Random(seed)
    pairs = random.sample([(a, b) for a in range(40) for b in range(40) if (a + b) % 2 == seed], count)
    return [{"a": a, "b": b, "sum": a + b} for a, b in pairs]


async def found(
    rollout: Callable[..., Any], train: list[Problem] | None = None, test: list[Problem] | None = None
) -> list[str]:
    stage = Stage(CFG, rollout, parallel=8, seed=3)
    seen = await examine(stage, train or problems(0), problems(1) if test is None else test, 16, budget_s=60.0)
    return [finding.title for finding in finding_of.found(DOMAIN, seen)]


async def test_a_domain_without_a_mistake_has_no_finding() -> None:
    assert await found(domain()) == []


def paid(reward: Callable[[str, Problem, float, bool], tuple[float, bool]]) -> Callable[..., Any]:
    """The domain whose rewards and successes are changed."""
    return domain(judge=lambda said, problem: reward(said, problem, *judged(said, problem)))


def holds_the_sum(said: str, problem: Problem) -> bool:
    return re.search(rf"\b{problem['sum']}\b", said) is not None


def raising(said: str, problem: Problem) -> tuple[float, bool]:
    match = re.fullmatch(r"<sum>(.+)</sum>.*", said, re.DOTALL)
    return (1.0, True) if match and float(match[1]) == problem["sum"] else (0.0, False)


coin = Random(5)
PLANTED: dict[str, tuple[Callable[..., Any], str]] = {
    "wrong sign": (paid(lambda s, p, r, ok: (-r, ok)), "a right answer is paid no more than a wrong one"),
    "success and reward inverted": (
        paid(lambda s, p, r, ok: (float(not ok), not ok)),
        "a right answer is paid no more than a wrong one",
    ),
    "constant reward": (paid(lambda s, p, r, ok: (0.5, ok)), "a right answer is paid no more than a wrong one"),
    "any number in its format": (
        paid(lambda s, p, r, ok: (1.0, True) if r >= 0 else (r, ok)),
        "a right answer is paid no more than a wrong one",
    ),
    "nothing is ever right": (paid(lambda s, p, r, ok: (0.0, False)), "no answer is right"),
    "empty is right": (paid(lambda s, p, r, ok: (1.0, True) if not s else (r, ok)), "the judge accepts: empty"),
    "the grader obeys": (
        paid(lambda s, p, r, ok: (1.0, True) if "verdict `correct`" in s else (r, ok)),
        "the judge accepts: injection",
    ),
    "a list of answers": (
        paid(lambda s, p, r, ok: (float(holds_the_sum(s, p)), holds_the_sum(s, p))),
        "the judge accepts: all answers at once",
    ),
    "silence is paid": (
        paid(lambda s, p, r, ok: (0.5, ok) if not s else (r, ok)),
        "no answer is paid more than a wrong one: empty",
    ),
    "length is paid": (
        paid(lambda s, p, r, ok: (r + len(s) / 100, ok)),
        "the same answer is paid more when it is longer",
    ),
    "a noisy judge": (paid(lambda s, p, r, ok: (r + coin.random(), ok)), "the judge disagrees with itself"),
    "raises": (domain(judge=raising), "an answer makes the domain raise"),
    "one prompt for all": (
        domain(ask=lambda problem: "Add the numbers. Answer as <sum>number</sum>."),
        "every problem has the same prompt",
    ),
    "a hint": (
        domain(ask=lambda problem: f"(check: {problem['sum']}) {asked(problem)}"),
        "the prompt holds the answer",
    ),
    "an outage is a reward": (domain(swallow=True), "a server that fails becomes a reward"),
}


@pytest.mark.parametrize("mistake", PLANTED)
async def test_a_planted_mistake_is_named(mistake: str) -> None:
    rollout, expected = PLANTED[mistake]
    assert expected in await found(rollout)


async def test_two_problems_are_too_few_to_say_that_no_answer_is_right() -> None:
    """Two right answers of two could be chance, so their value does not count as the answer."""
    assert await found(domain(), train=problems(0, 2)) == []
    assert "no answer is right" not in await found(PLANTED["nothing is ever right"][0], train=problems(0, 2))
    assert "no answer is right" in await found(PLANTED["nothing is ever right"][0], train=problems(0, 5))


async def test_training_problems_among_the_test_problems_are_named() -> None:
    def shouted(problem: Problem) -> str:
        return asked(problem).upper() if problem.get("test") else asked(problem)

    train = problems(0)
    copies = [{**problem, "test": True} for problem in train[:20]] + problems(1, 40)
    assert await found(domain(ask=shouted), train, copies) == ["test problems are trained"]


def test_the_command_prints_what_players_earn_and_finds_nothing_in_a_shipped_domain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "doctor.json"
    assert main(["--config-name=quickstart", "--problems=16", f"--json={out}"]) == 0
    (domain_found,) = json.loads(out.read_text())
    earned = {row["player"]: row["success"] for row in domain_found["players"]}
    assert earned["reference"] == 1.0
    assert earned["empty"] == 0.0
    assert "nothing was found" in capsys.readouterr().out


def test_a_domain_that_cannot_be_loaded_is_refused_with_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name=quickstart", "dataset_loader=no.such.loader"]) == EXIT_REFUSED
    assert "`dataset_loader`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("usual_s", "worst_s", "found"), [(0.1, 1.9, False), (0.1, 2.1, True), (0.5, 4.9, False), (0.5, 5.1, True)]
)
def test_a_judgement_is_slow_beyond_two_seconds_and_ten_times_the_median(
    usual_s: float, worst_s: float, found: bool
) -> None:
    rollouts = [Observation(player="empty", problem=n, prompt="", seconds=usual_s) for n in range(8)]
    rollouts.append(Observation(player="longest", problem=0, prompt="", seconds=worst_s))
    assert [finding.title for finding in slow(Seen(rollouts=rollouts))] == found * ["an answer takes the judge long"]


def test_a_copying_rule_is_tested_on_problems_that_did_not_make_it() -> None:
    random = Random(0)
    triples = [random.sample(range(10, 99), 3) for _ in range(60)]
    open_rule = [(f"The largest of {a}, {b} and {c} is {max(a, b, c)}.", str(max(a, b, c))) for a, b, c in triples]
    fair = [(f"Which is the largest of {a}, {b} and {c}?", str(max(a, b, c))) for a, b, c in triples]
    assert copying_rule(open_rule)[1:] == (30, 30)
    _, solved, tried = copying_rule(fair)
    assert tried == 30
    assert solved < 20


def test_an_answer_is_a_value_that_differs_and_a_hidden_one_stands_in_no_prompt() -> None:
    rows = [
        {"id": 0, "task": "2 + 3?", "answer": "5", "tests": [1], "dataset": "d"},
        {"id": 1, "task": "4 + 4?", "answer": "8", "tests": [2], "dataset": "d"},
    ]
    prompts = ["<q> 2 + 3?", "<q> 4 + 4?"]
    assert {option.field for option in candidates(rows, prompts)} == {"id", "task", "answer"}
    assert "<q>{}</q>" in {option.template for option in candidates(rows, prompts)}
    assert hidden_fields(rows, prompts) == ["answer"]


@pytest.mark.parametrize(("rollout_s", "problems_played"), [(0.001, 24), (0.1, 13), (3.0, 8)])
def test_a_slow_domain_plays_fewer_problems(rollout_s: float, problems_played: int) -> None:
    assert affordable(24, rollout_s, 40.0) == problems_played


def test_secret_in_what_a_domain_raises_is_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    assert main(["--config-name=quickstart", "dataset_loader=no.such.hf_0123456789"]) == EXIT_REFUSED
    said = capsys.readouterr().err
    assert "no.such.***" in said
    assert "hf_0123456789" not in said
