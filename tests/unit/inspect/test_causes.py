"""Planted failures: the right cause comes first, and nothing is said about runs that learn."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.inspect.finding import Level
from pipelinerl.inspect.why.attempts import GIVEN_UP, causes
from pipelinerl.inspect.why.evidence import Attempt, Drift
from pipelinerl.inspect.why.metrics import failures_pay
from pipelinerl.records.drops import DropReason, DropStage
from tests.evidence import config, evidence
from tests.planted_runs import FAULTS, Fault, play


@pytest.mark.parametrize("expected", FAULTS)
def test_planted_failure_is_the_first_cause(expected: str) -> None:
    found = causes(play(FAULTS[expected]))
    names = [cause.title for cause in found]
    assert names[:1] == [expected], [cause.line() for cause in found]
    assert len(names) == len(set(names)), "a check and an alarm of one name are one cause"


@pytest.mark.parametrize("seed", range(3))
def test_healthy_run_has_no_cause(seed: int) -> None:
    assert [cause.line() for cause in causes(play(Fault(), seed))] == []


@pytest.mark.parametrize(
    ("change", "apart", "found"),
    [
        (2.1e-10, 0.41, ["stale server"]),  # a real server that kept its weights of version 20
        (0.043, 0.017, []),  # a healthy one
        (0.0011, 8.3e-05, []),  # tokens that are nearly certain
        (0.0, 0.0, []),  # nothing is trained: nobody moves
    ],
)
def test_server_that_says_the_same_while_the_trainer_moves_is_stale(
    change: float, apart: float, found: list[str]
) -> None:
    drift = Drift(first=50, last=100, contexts=1156, change=change, apart=apart)
    assert [cause.title for cause in causes(evidence(drifts=[drift]))] == found


def test_a_policy_that_broke_is_not_too_hard_a_task() -> None:
    """Before training, a quarter of the attempts succeed: of eight, none does in (1 − .26)^8 = 9 % of the groups."""
    attempts = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=float(wins), success=float(wins))
        for n in range(1024)
        for wins in [n < 64 and n % 4 == 0]
    ]
    assert "too hard" not in [cause.title for cause in causes(evidence(attempts=attempts))]
    hopeless = [Attempt(group=f"{n // 8}", version=n // 64, reward=0.0, success=0.0) for n in range(1024)]
    assert "too hard" in [cause.title for cause in causes(evidence(attempts=hopeless))]


@pytest.mark.parametrize(
    ("asked", "expected"), [(0.0, "problem not in prompt"), (1.0, "too hard"), (0.5, "too hard"), (None, "too hard")]
)
def test_task_is_too_hard_only_where_the_prompts_ask_it(asked: float | None, expected: str) -> None:
    hopeless = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=0.0, success=0.0, asked=asked if n % 4 else 1.0)
        for n in range(1024)
    ]
    names = [cause.title for cause in causes(evidence(attempts=hopeless))]
    assert expected in names
    assert len({"too hard", "problem not in prompt"} & set(names)) == 1


def test_prompt_in_other_words_says_nothing_of_a_run_that_solves_problems() -> None:
    solved = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=float(n % 2), success=float(n % 2), asked=0.0)
        for n in range(1024)
    ]
    assert "problem not in prompt" not in [cause.title for cause in causes(evidence(attempts=solved))]


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        ({"verifier": 80, "no_trained_tokens": 20}, "judge down"),
        ({"verifier": 20, "no_trained_tokens": 80}, "nothing to train"),
        ({"domain_error": 100}, "domain fails"),
        ({"transport": 100}, "servers fail"),
        ({"timeout": 100}, "rollouts time out"),
        ({"too_long": 100}, "sequences too long"),
        ({"prompt_too_long": 100}, "sequences too long"),
        ({"poisonous": 100}, "workers die"),
        ({"of_a_later_version": 100}, "groups given up"),
    ],
)
def test_groups_that_are_given_up_accuse_what_most_of_them_failed_for(dropped: dict[str, int], expected: str) -> None:
    (cause,) = causes(evidence(dropped=dropped, groups=99))
    assert (cause.title, cause.level) == (expected, Level.DELIVERY)
    assert "100 of 199 groups were given up" in cause.evidence
    assert causes(evidence(dropped=dropped, groups=100)) == []


def test_every_reason_of_a_dropped_group_has_a_cause() -> None:
    by_the_actor = {reason for reason in DropReason if DropStage.ATTEMPT in reason.stage} | {DropReason.TOO_LARGE}
    assert set(GIVEN_UP) == by_the_actor


@pytest.mark.parametrize(("last_success", "found"), [(511, True), (300, False)])
def test_judge_is_down_only_where_success_ends_at_once(last_success: int, found: bool) -> None:
    """Half of the attempts succeed until all earn the same. A policy that failed 200 attempts earlier did so itself."""
    attempts = [
        Attempt(group=f"{n // 8}", version=n // 64, reward=reward, success=float(n <= last_success and n % 2))
        for n in range(1024)
        for reward in [0.0 if n > 511 else float(n % 3)]
    ]
    names = [cause.title for cause in causes(evidence(attempts=attempts))]
    assert ("judge down" in names) is found


@pytest.mark.parametrize(("full", "found"), [(600, ["full context"]), (400, [])])
def test_context_that_ends_most_answers_is_named_with_its_length(full: int, found: list[str]) -> None:
    """Of 1,024 attempts. Their two tokens are no answer, which looks like a tokenizer of another model."""
    attempts = [
        Attempt(
            group=f"{n // 8}", version=n // 64, reward=float(n % 2), success=float(n % 2), tokens=2, is_full=n < full
        )
        for n in range(1024)
    ]
    cfg = config("+vllm_config.vllm_kwargs.max-model-len=24")
    named = [cause for cause in causes(evidence(cfg=cfg, attempts=attempts)) if cause.title == "full context"]
    assert [cause.title for cause in named] == found
    for cause in named:
        assert "600 of 1024 attempts" in cause.evidence
        assert "max_model_len (it is 24)" in cause.fix


def groups_of(answers: list[str], rewards: list[list[float]]) -> list[Attempt]:
    """Groups in the order of their versions. A letter is an answer; success is a reward of 1."""
    return [
        Attempt(group=f"0-{n}", version=n, reward=reward, success=float(reward == 1), answer=letter.encode())
        for n, (letters, earned) in enumerate(zip(answers, rewards, strict=True))
        for letter, reward in zip(letters, earned, strict=True)
    ]


def named(attempts: list[Attempt]) -> list[str]:
    found = [cause.title for cause in causes(evidence(answers=attempts))]
    return [name for name in found if name in ("noisy judge", "confident failures")]


@pytest.mark.parametrize(
    ("earned", "found"),
    [
        ([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 1.0, 0.0]], ["noisy judge"]),
        ([[1.0, 1.0, 0.0, 0.0]] * 2, []),
        ([[1.0, 0.9, 0.0, 0.1]] * 2, []),  # 0.02 of variance 0.905 / 3 lies between equal answers
        ([[1.0, 1.0, 1.0, 1.0]] * 2, []),
    ],
)
def test_judge_is_noisy_where_equal_answers_earn_as_differently_as_others(
    earned: list[list[float]], found: list[str]
) -> None:
    """16 times two groups of two answers, each given twice: 64 pairs of equal answers."""
    assert named(groups_of(["aabb"] * 32, earned * 16)) == found
    assert named(groups_of(["aabb"] * 14, earned * 7)) == [], "28 pairs are too few"


@pytest.mark.parametrize(
    ("letters", "failing", "found"),
    [
        ("aaaa", 12, ["confident failures"]),  # 12 of 30 sure groups: from 25 % on
        ("aaaa", 8, ["confident failures"]),  # from 14 % on
        ("aaaa", 5, []),  # from 7 % on: so many may be mistakes of the policy's own
        ("aaaa", 30, []),  # nothing is ever right
        ("aaab", 12, []),  # the policy is not sure
        ("aaa", 12, []),
    ],
)
def test_failures_are_confident_where_all_attempts_agree_and_many_such_groups_fail(
    letters: str, failing: int, found: list[str]
) -> None:
    """90 groups, of which the newest third counts."""
    attempts = len(letters)
    newest = [[float(n >= failing)] * attempts for n in range(30)]
    assert named(groups_of([letters] * 90, [[1.0] * attempts] * 60 + newest)) == found
    assert named(groups_of([letters] * 90, newest + [[1.0] * attempts] * 60)) == [], "an old state"


def test_command_names_a_group_of_a_domain_of_any_name() -> None:
    rewards = [[1.0] * 4] * 60 + [[float(n >= 12)] * 4 for n in range(30)]
    attempts = [replace(attempt, group=f"my {{x}}-{attempt.group}") for attempt in groups_of(["aaaa"] * 90, rewards)]
    found = causes(evidence(answers=attempts))
    (cause,) = (cause for cause in found if cause.title == "confident failures")
    assert cause.command_in(Path("/r/a {run}")) == "pipelinerl rollouts '/r/a {run}' --group='my {x}-0-71'"


def test_an_entropy_collapse_beside_confident_failures_may_be_that_of_wrong_references() -> None:
    """A policy that is right keeps no entropy either, and wrong references keep success down."""
    found = causes(play(Fault(learning_rate=0.3, unsayable=0.5)))
    assert [cause.title for cause in found] == ["entropy collapse", "confident failures"]
    assert found[0].fix.startswith("If the answers of the confident failures below are right, mend their references.")


@pytest.mark.parametrize(("paid", "pay"), [(3, False), (5, True)])
def test_failures_pay_where_more_than_a_tenth_of_the_newest_earn_what_successes_do(paid: int, pay: bool) -> None:
    """160 failures, of which the newest 40 count, after 8 successes that earn 1."""
    wins = [Attempt(group="0-0", version=0, reward=1.0, success=1.0)] * 8
    lost = [Attempt(group="0-1", version=1, reward=float(n >= 160 - paid), success=0.0) for n in range(160)]
    assert failures_pay([*wins, *lost]) is pay


@pytest.mark.parametrize(("ratio", "lag", "found"), [(0.59, 0.9, False), (0.62, 0.9, True), (9.0, 0.45, False)])
def test_step_is_too_long_where_it_leaves_less_than_half_of_the_tokens_effective(
    ratio: float, lag: float, found: bool
) -> None:
    """√(2 ln 2 / π) = 0.664 nats for each step of lag, 0.597 at 0.9. Of a lag below half a step nothing is said."""
    points = [{"step": step, "logratio_abs_mean": ratio, "lag_mean": lag} for step in range(8)]
    titles = [cause.title for cause in causes(evidence(finetune=points))]
    assert ("learning rate too high" in titles) is found


def test_step_is_too_long_only_where_four_steps_are() -> None:
    points = [{"step": step, "logratio_abs_mean": 2.0 * (step == 5), "lag_mean": 1.0} for step in range(16)]
    assert "learning rate too high" not in [cause.title for cause in causes(evidence(finetune=points))], "2 / 4 nats"
    points = [{"step": step, "logratio_abs_mean": 2.0 * (step in (5, 6)), "lag_mean": 1.0} for step in range(16)]
    (cause,) = [cause for cause in causes(evidence(finetune=points)) if cause.title == "learning rate too high"]
    assert cause.step == 5


@pytest.mark.parametrize(("change", "stale"), [(0.011, False), (0.009, True)])
def test_server_is_stale_that_moves_less_than_a_tenth_of_the_trainers_distance(change: float, stale: bool) -> None:
    drift = Drift(first=0, last=50, contexts=100, change=change, apart=0.1)
    assert bool(causes(evidence(drifts=[drift]))) is stale


@pytest.mark.parametrize(("tokens", "down"), [(14, True), (17, False)])
def test_judge_is_down_where_answers_keep_half_of_their_form(tokens: int, down: bool) -> None:
    """All attempts succeed, then none does, with answers of other lengths: 10 tokens before."""
    attempts = [
        Attempt(group=f"{n}", version=n // 64, reward=float(n < 512), success=float(n < 512), tokens=length)
        for n in range(1024)
        for length in [10 if n < 512 else tokens]
    ]
    assert ("judge down" in [cause.title for cause in causes(evidence(attempts=attempts))]) is down
