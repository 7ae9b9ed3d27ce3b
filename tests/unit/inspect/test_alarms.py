"""Every alarm on curves made by hand: it is raised where it should be, names the step, and is silent on a good run."""

import re
from collections import deque
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from pipelinerl.inspect import finding
from pipelinerl.inspect.curves import WINDOW
from pipelinerl.inspect.finding import Finding
from pipelinerl.inspect.page.build import collect
from pipelinerl.inspect.why.metrics import METRICS, reward_without_success
from pipelinerl.records import CalibrationExceeded, EvaluationDone, ProbeMissed, WeightUpdateSuccess
from pipelinerl.streams import set_streams_backend
from tests.evidence import config, evidence
from tests.run_folder import Story, make_run
from tests.says import says

N = 40
RISING = [i / (N - 1) for i in range(N)]


def points(**curves: list[float]) -> list[dict]:
    num_points = min(map(len, curves.values()))
    curves = {"rollouts": [1024 + 64 * i for i in range(num_points)]} | curves
    return [{"step": i} | {name: values[i] for name, values in curves.items()} for i in range(num_points)]


GOOD: dict[str, Any] = {
    "finetune": points(
        entropy=[1.0 - 0.5 * x for x in RISING],  # more than a third is left, whatever success is
        clip_fraction=[0.05] * N,
        logratio_abs_max_lag0=[0.02] * N,
        live_version=[max(0.0, i - 1.0) for i in range(N)],
    ),
    "actor": points(
        reward=RISING, success=RISING, no_answer=[0.2] * N, output_tokens=[100.0 + 50 * x for x in RISING],
        cut_by_length=[0.01] * N,
    ),
    "preprocessor": points(advantage_std=[0.5] * N),
    "messages": [WeightUpdateSuccess(version=3, servers=("actor_llm_0", "actor_llm_1"))],
    "unreadable_share": 0.001,
}  # fmt: skip


def found(**changes: Any) -> list[Finding]:
    return finding.found(METRICS, evidence(**(GOOD | changes)))


def test_alarms_good_run_and_empty_run_have_none() -> None:
    assert found() == []
    assert finding.found(METRICS, evidence()) == []
    one = evidence(finetune=points(entropy=RISING)[:1], actor=points(success=RISING)[:1])
    assert finding.found(METRICS, one) == []


def test_reward_hack_reward_grows_and_success_does_not() -> None:
    falling = [0.4 - 0.1 * x + 0.02 * (-1) ** i for i, x in enumerate(RISING)]
    (alarm,) = found(actor=points(reward=RISING, success=falling))
    assert (alarm.title, alarm.step) == ("reward hack", 0)
    assert "success from 0.39 to 0.31" in alarm.evidence
    assert found(actor=points(reward=RISING, success=[0.99] * N)) == [], "nothing was left to gain"
    assert found(actor=points(reward=[0.5] * N, success=[0.4] * N)) == [], "neither grows"


def test_reward_hack_of_a_run_that_has_twelve_points() -> None:
    """The curves of a run of 60 steps in eleven seconds. The means of four points at both ends are compared."""
    reward = [0.50, 0.48, 0.52, 0.58, 0.66, 0.74, 0.78, 0.84, 0.88, 0.93, 0.96, 0.98]
    success = [0.16, 0.20, 0.24, 0.32, 0.38, 0.39, 0.33, 0.29, 0.24, 0.23, 0.18, 0.15]
    (alarm,) = found(actor=points(reward=reward, success=success))
    assert (alarm.title, alarm.step) == ("reward hack", 0)
    assert "reward went from 0.52 to 0.94 and success from 0.23 to 0.20" in alarm.evidence
    assert found(actor=points(reward=reward[:11], success=success[:11])) == [], "too few points to say"


def running_means(seed: int, *, success: tuple[float, float], form: tuple[float, float], pay: tuple[float, float]):
    """60 points, each the means of the last 1,024 rollouts, 64 of them new. Chances of success and of a good form go
    from the first to the last value, and the reward is the sum of what each is paid."""
    random, window, curves = Random(seed), deque(maxlen=1024), {"reward": [], "success": []}
    for i in range(60):
        for _ in range(64):
            won, formed = (random.random() < low + (high - low) * i / 59 for low, high in (success, form))
            window.append((pay[0] * won + pay[1] * formed, float(won)))
        for curve, values in zip(curves.values(), zip(*window, strict=True), strict=True):
            curve.append(fmean(values))
    return points(**curves)


@pytest.mark.parametrize(
    ("success", "form", "pay", "hacked"),
    [
        ((0.24, 0.29), (0.5, 0.5), (1.0, 0.0), 0),  # the reward is success, which rises within its noise of counting
        ((0.24, 0.29), (0.5, 0.5), (10.0, 0.0), 0),
        ((0.24, 0.24), (0.5, 0.5), (1.0, 1.0), 0),  # a walk of the running mean is no rise
        ((0.24, 0.24), (0.2, 0.8), (1.0, 0.2), 8),
        ((0.24, 0.28), (0.1, 0.7), (1.0, 1.0), 8),
        ((0.21, 0.09), (0.1, 0.7), (0.0, 1.0), 8),
    ],
)
def test_reward_hack_is_what_success_does_not_explain(
    success: tuple[float, float], form: tuple[float, float], pay: tuple[float, float], hacked: int
) -> None:
    runs = [running_means(seed, success=success, form=form, pay=pay) for seed in range(8)]
    assert sum(bool(list(reward_without_success(evidence(actor=run)))) for run in runs) == hacked


def test_means_of_a_few_rollouts_are_no_hack() -> None:
    """The first points of a run of two minutes per step: one each second, and eight new rollouts in some of them."""
    seen = [(8, 0.0, 0.0)] * 3 + [(24, 0.059, 0.0417)] * 4 + [(32, 0.0842, 0.0625)] * 4 + [(48, 0.0637, 0.0417)] * 9
    rollouts, reward, success = map(list, zip(*seen, strict=True))
    assert found(actor=points(rollouts=rollouts, reward=reward, success=success)) == []


def test_nccl_group_that_failed_is_an_alarm_with_the_interface() -> None:
    (alarm,) = found(finetune=[*GOOD["finetune"][:-1], GOOD["finetune"][-1] | {"nccl_groups_failed/eth1": 2.0}])
    assert (alarm.title, alarm.step, alarm.about) == ("NCCL group failed", N - 1, "eth1")
    assert "2 NCCL group(s) failed: their weights came over TCP through eth1" in alarm.evidence


def test_entropy_collapse_is_what_success_does_not_explain() -> None:
    """Success of 0.2, then 0.4 explains a fall of the entropy from 1 to 0.75, and a third of that is 0.25."""
    success = [0.2] * 20 + [0.4] * 20
    learning = points(success=success, reward=success)
    sure, unsure = points(entropy=[1.0] * 20 + [0.2] * 20), points(entropy=[1.0] * 20 + [0.3] * 20)
    (alarm,) = found(finetune=sure, actor=learning)
    assert (alarm.title, alarm.step) == ("entropy collapse", 20)
    assert "success of 0.40 explains a fall to 0.75" in alarm.evidence
    assert found(finetune=unsure, actor=learning) == []
    noisy = points(entropy=[1.0] * 20 + [0.2 + 0.15 * (-1) ** i for i in range(20)])
    assert found(finetune=noisy, actor=learning) == [], "a fall from 0.75 to 0.2 is within its noise"
    assert found(finetune=sure, actor=points(success=[0.2] * 20 + [0.99] * 20)) == [], "nothing is left to gain"


def test_length_explosion_needs_cuts_or_a_runaway() -> None:
    growing = [100.0 * (1 + 2 * x) for x in RISING]
    uncut = {"reward": RISING, "success": RISING, "output_tokens": growing}
    assert found(actor=points(**uncut, cut_by_length=[0.0] * N)) == []
    (alarm,) = found(actor=points(**uncut, cut_by_length=[0.3] * N))
    assert alarm.title == "length explosion"
    (alarm,) = found(actor=points(**(uncut | {"output_tokens": [100.0 * (1 + 6 * x) for x in RISING]})))
    assert "grew from" in alarm.evidence


def test_zero_advantages_cure_depends_on_success() -> None:
    zero = points(advantage_std=[0.5] * (N - WINDOW) + [0.0] * WINDOW)
    (alarm,) = found(preprocessor=zero)
    assert (alarm.title, alarm.step) == ("all-zero advantages", N - WINDOW)
    assert "solved" in alarm.fix
    (alarm,) = found(preprocessor=zero, actor=points(success=[0.0] * N, reward=[0.0] * N))
    assert "too hard" in alarm.fix


def test_clip_fraction_beyond_its_bound() -> None:
    (alarm,) = found(finetune=points(clip_fraction=[0.05] * 30 + [0.6] * 10))
    assert (alarm.title, alarm.step) == ("clip fraction", 30)


def test_forked_conversations_names_its_step_and_the_share_of_calls() -> None:
    forking = points(forks=[0.0] * 30 + [3.0] * 10, llm_calls=[8.0] * N)
    (alarm,) = found(actor=forking)
    assert (alarm.title, alarm.step) == ("forked conversations", 30)
    assert re.search(says("3.0 of 8.0", "llm.chat_template"), alarm.line())
    assert found(actor=points(forks=[0.25] * N, compacted=[3.0] * N, llm_calls=[8.0] * N)) == []


def test_mismatch_names_the_age_of_the_tokens_or_the_numerics() -> None:
    gap = [0.05] * 20 + [0.4] * 20
    (alarm,) = found(finetune=points(logratio_abs_mean=gap, logratio_abs_max_lag0=[0.02] * N, lag_min=[0.0] * N))
    assert (alarm.title, alarm.step) == ("mismatch", 20)
    assert "age" in alarm.evidence
    assert "max_lag_steps" in alarm.fix
    (alarm,) = found(finetune=points(logratio_abs_mean=gap, logratio_abs_max_lag0=[0.9] * N, lag_min=[0.0] * N))
    assert "numerics" in alarm.evidence
    assert "fp32_lm_head" in alarm.fix
    assert found(finetune=points(logratio_abs_mean=[0.15] * N)) == []


def test_stalled_version_only_when_it_stands_still() -> None:
    (alarm,) = found(finetune=points(live_version=[float(min(i, 12)) for i in range(N)]))
    assert (alarm.title, alarm.step) == ("stalled version", 12)
    assert re.search(says("version 12", "step 39"), alarm.evidence)
    rare = points(live_version=[float(i - i % 20) for i in range(N)])
    assert found(finetune=rare, cfg=config("finetune.weight_update_interval=20")) == []
    assert [alarm.title for alarm in found(finetune=rare)] == ["stalled version"]


def test_stale_server_by_its_probe_and_by_its_log_probabilities() -> None:
    miss = ProbeMissed(server="actor_llm_1", version=7, since=6, is_final=False, reason="bytes differ")
    (alarm,) = found(messages=[*GOOD["messages"], miss, miss])
    assert (alarm.title, alarm.step) == ("stale server", 7)
    assert "actor_llm_1" in alarm.evidence
    (alarm,) = found(finetune=points(logratio_abs_max_lag0=[0.02] * 10 + [5.0] * 30))
    assert (alarm.title, alarm.step) == ("stale server", 10)


def test_server_that_differs_before_any_update_is_an_alarm_by_its_name_and_figures() -> None:
    message = CalibrationExceeded(server="actor_llm_1", difference=0.0124, limit=0.001)
    (alarm,) = found(messages=[*GOOD["messages"], message, message])
    assert (alarm.title, alarm.step) == ("calibration", 0)
    assert re.search(says("actor_llm_1", "0.012 nats", 0.001), alarm.evidence)
    assert "weights.probe_tolerance" in alarm.fix


def test_server_out_of_service_without_a_missed_probe() -> None:
    """The last step of a run that is stopped is saved when its servers are gone, so one update says nothing."""
    without = [WeightUpdateSuccess(version=version, servers=("actor_llm_0",)) for version in (9, 10)]
    assert found(messages=[*GOOD["messages"], WeightUpdateSuccess(version=9, servers=())]) == []
    (alarm,) = found(messages=[*GOOD["messages"], *without])
    assert (alarm.title, alarm.step) == ("server out of service", 3)
    assert "actor_llm_1" in alarm.evidence


def test_bad_tokenizer_by_its_text_and_by_its_answers() -> None:
    (alarm,) = found(unreadable_share=0.6)
    assert alarm.title == "bad tokenizer"
    (alarm,) = found(actor=points(no_answer=[0.97] * N, success=[0.0] * N, reward=[0.0] * N))
    assert alarm.title == "bad tokenizer"
    learned = points(no_answer=[0.97] * 20 + [0.1] * 20, success=RISING, reward=RISING)
    assert found(actor=learned) == [], "a model that learns the format"


def evaluated(*successes: float, rollouts: int = 512) -> list[EvaluationDone]:
    return [
        EvaluationDone(version=40 * place, success=success, reward=success, num_rollouts=rollouts, metrics={})
        for place, success in enumerate(successes)
    ]


STILL = points(reward=[0.4] * N, success=[0.4] * N)


def test_flat_evaluation_is_one_whose_interval_shows_no_progress() -> None:
    """Of 512 rollouts 0.40 is 0.358 to 0.443 and 0.47 is 0.427 to 0.513: they overlap. 0.50 begins at 0.457."""
    (alarm,) = found(actor=STILL, evaluations=evaluated(0.40, 0.47))
    assert alarm.title == "flat evaluation"
    assert "0.358–0.443 and 0.427–0.513" in alarm.evidence
    assert found(actor=STILL, evaluations=evaluated(0.40, 0.50)) == []
    (alarm,) = found(actor=STILL, evaluations=evaluated(0.40, 0.30))
    assert alarm.title == "falling evaluation"
    assert found(actor=STILL, evaluations=evaluated(0.99, 0.99)) == [], "it is solved"


def test_evaluation_of_few_problems_does_not_contradict_training() -> None:
    assert found(evaluations=evaluated(0.4, 0.5, rollouts=30)) == [], "success on training problems rises"
    (alarm,) = found(actor=STILL, evaluations=evaluated(0.4, 0.5, rollouts=30))
    assert "more test problems" in alarm.fix


def test_low_effective_sample_size_names_what_is_not_set_already() -> None:
    falling = points(ess=[0.97] * 20 + [0.3] * 20)
    (alarm,) = found(finetune=falling, cfg=config("max_lag_steps=0", "finetune.learning_rate=3e-5"))
    assert (alarm.title, alarm.step) == ("low effective sample size", 20)
    assert alarm.fix == "You could set finetune.rl.proximal_every or lower finetune.learning_rate (it is 3e-05)"
    assert found(finetune=points(ess=[0.0] * N)) == [], "nothing was sampled"


def test_teacher_whose_signal_is_below_the_noise_of_both_ends() -> None:
    """A gap of 0.05 has 0.04 of signal beside 0.03 of noise, and 0.03 beside 0.04."""
    curves = {"teacher_gap": [0.5] * 20 + [0.05] * 20, "teacher_noise": [0.03] * N}
    assert found(finetune=points(**curves)) == []
    (alarm,) = found(finetune=points(**curves | {"teacher_noise": [0.04] * N}))
    assert (alarm.title, alarm.step) == ("teacher within noise", 20)
    assert "differ from the policy's by 0.05 nats per token" in alarm.evidence
    assert "would differ by 0.04" in alarm.evidence


def test_rising_entropy_beyond_its_noise_without_success() -> None:
    noisy = [1.0 + (0.1 if place % 2 else 0.0) for place in range(N)]
    rising = [value + 0.5 * place / N for place, value in enumerate(noisy)]
    (alarm,) = found(finetune=points(entropy=rising), actor=STILL)
    assert alarm.title == "rising entropy"
    assert found(finetune=points(entropy=noisy), actor=STILL) == []
    assert found(finetune=points(entropy=rising)) == [], "it succeeds"


@pytest.mark.parametrize(("never", "always", "name"), [(0.95, 0.0, "never"), (0.02, 0.93, "always")])
def test_groups_without_signal(never: float, always: float, name: str) -> None:
    solved = {"groups_never_solved": [0.5] * 30 + [never] * 10, "groups_always_solved": [0.1] * 30 + [always] * 10}
    (alarm,) = found(actor=points(reward=RISING, success=RISING, **solved))
    assert (alarm.title, alarm.step) == (f"groups {name} solved", 30)


def growing(factor: float, cut: float) -> dict[str, Any]:
    """Rollouts whose length grows to so many times the first, of which so many are cut."""
    lengths = [100.0] * 20 + [100.0 * factor] * 20
    return {"actor": points(reward=RISING, success=RISING, output_tokens=lengths, cut_by_length=[cut] * N)}


def behind(steps: int) -> dict[str, Any]:
    """Servers that keep version 20 while the trainer goes on by so many steps."""
    return {"finetune": points(live_version=[float(min(i, 20)) for i in range(20 + steps + 1)])}


BOUNDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "clip fraction": (
        "clip fraction",
        {"finetune": points(clip_fraction=[0.29] * N)},
        {"finetune": points(clip_fraction=[0.31] * N)},
    ),
    "nats between both ends": (
        "mismatch",
        {"finetune": points(logratio_abs_mean=[0.19] * N)},
        {"finetune": points(logratio_abs_mean=[0.21] * N)},
    ),
    "nats of fresh tokens": (
        "stale server",
        {"finetune": points(logratio_abs_max_lag0=[0.95] * N)},
        {"finetune": points(logratio_abs_max_lag0=[1.05] * N)},
    ),
    "three newest points": (
        "stale server",
        {"finetune": points(logratio_abs_max_lag0=[5.0] * 2)},
        {"finetune": points(logratio_abs_max_lag0=[5.0] * 3)},
    ),
    "3 versions and 8 points behind, of 1 step each": ("stalled version", behind(12), behind(13)),
    "effective sample size": (
        "low effective sample size",
        {"finetune": points(ess=[0.51] * N)},
        {"finetune": points(ess=[0.49] * N)},
    ),
    "tokens that are no text": ("bad tokenizer", {"unreadable_share": 0.19}, {"unreadable_share": 0.21}),
    "rollouts without an answer": (
        "bad tokenizer",
        {"actor": points(no_answer=[0.89] * N, success=[0.0] * N)},
        {"actor": points(no_answer=[0.91] * N, success=[0.0] * N)},
    ),
    "success without an answer": (
        "bad tokenizer",
        {"actor": points(no_answer=[1.0] * N, success=[0.025] * N)},
        {"actor": points(no_answer=[1.0] * N, success=[0.015] * N)},
    ),
    "forks": (
        "forked conversations",
        {"actor": points(forks=[0.45] * N, llm_calls=[8.0] * N)},
        {"actor": points(forks=[0.55] * N, llm_calls=[8.0] * N)},
    ),
    "groups never solved": (
        "groups never solved",
        {"actor": points(groups_never_solved=[0.89] * N, groups_always_solved=[0.0] * N)},
        {"actor": points(groups_never_solved=[0.91] * N, groups_always_solved=[0.0] * N)},
    ),
    "growth of cut rollouts": ("length explosion", growing(1.9, 0.3), growing(2.1, 0.3)),
    "cut among grown rollouts": ("length explosion", growing(3.0, 0.09), growing(3.0, 0.11)),
    "growth without cuts": ("length explosion", growing(3.9, 0.0), growing(4.1, 0.0)),
    "success that leaves nothing to gain": (
        "reward hack",
        {"actor": points(reward=RISING, success=[0.96] * N)},
        {"actor": points(reward=RISING, success=[0.94] * N)},
    ),
    "half of an interval: 0.051 of 350 rollouts, 0.049 of 390": (
        "flat evaluation",
        {"evaluations": evaluated(0.4, 0.4, rollouts=350)},
        {"evaluations": evaluated(0.4, 0.4, rollouts=390)},
    ),
}


@pytest.mark.parametrize("bound", BOUNDS)
def test_bound_parts_a_run_from_one_with_a_finding(bound: str) -> None:
    title, inside, outside = BOUNDS[bound]
    assert title not in [finding.title for finding in found(**inside)]
    assert title in [finding.title for finding in found(**outside)]


@pytest.mark.parametrize(
    ("story", "name"),
    [
        (Story(steps=N, actor={"reward": RISING, "success": [0.4] * N}), "reward hack"),
        (Story(steps=N, finetune={"logratio_abs_max_lag0": [3.0] * N}), "stale server"),
        (Story(steps=N, actor={"no_answer": [1.0] * N, "success": [0.0] * N, "reward": [0.0] * N}), "bad tokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_report_of_a_planted_fault_names_it_first(tmp_path: Path, story: Story, name: str) -> None:
    set_streams_backend("files")
    assert [alarm["title"] for alarm in collect(make_run(tmp_path / "run", story))["alarms"]] == [name]
