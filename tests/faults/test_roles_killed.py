"""Real runs whose roles are killed or frozen go on by themselves and train every sample exactly once."""

from pathlib import Path

import pytest

from benchmarks.recovery import JUDGED
from benchmarks.struck_run import STEPS, Outcome, Strike, run_struck

RUN_TIMEOUT_S = 840.0


def assert_undisturbed(outcome: Outcome, success: float = 0.6) -> None:
    assert outcome.problems == [], outcome.output[-4000:]
    assert (outcome.missed, outcome.launches) == (0, 1)
    assert outcome.success is not None
    assert outcome.success >= success, outcome.output[-2000:]


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize(
    ("streams", "steps"),
    [("redis", 64), *[pytest.param(streams, STEPS, marks=pytest.mark.slow) for streams in ("redis", "files")]],
)
def test_run_with_every_role_killed_ends_by_itself_and_learns_with_nothing_lost_or_left(
    streams: str, steps: int, tmp_path: Path
):
    """A run of all steps learns as an undisturbed one. A short one is not asked."""
    strikes = [
        Strike(job="actor_0", step=7),
        Strike(job="preprocessor_0", step=16, delay_s=0.1),
        Strike(job="verifier_0", step=22),
        Strike(job="finetune_0", step=29),
        Strike(job="finetune_0", step=38, moment="checkpoint"),
        Strike(job="actor_llm_0", step=46, child=True),
    ]
    restarts = {"actor_0": 1, "preprocessor_0": 1, "verifier_0": 1, "finetune_0": 2, "actor_llm_0": 1}
    if streams == "redis":
        strikes.insert(2, Strike(job="redis_0", step=19, child=True))
        restarts["redis_0"] = 1
    overrides = [*JUDGED, f"streams={streams}", "finetune.save_checkpoint_steps=8", "launcher.max_restarts=7"]
    overrides += ["eval.max_problems=64"] if steps < STEPS else []
    struck = run_struck(tmp_path / "run", strikes, overrides, steps=steps, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck, success=0.6 if steps == STEPS else 0.0)
    assert struck.samples["trained"] == steps * 64
    assert struck.restarts == restarts


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("job", ["actor_0", "preprocessor_0", "finetune_0", "actor_llm_0"])
def test_role_frozen_for_ever_is_restarted_and_the_run_ends(job: str, tmp_path: Path):
    strikes = [Strike(job=job, step=9, action="freeze")]
    overrides = ["finetune.save_checkpoint_steps=8", "launcher.heartbeat_timeout_s=10", "weights.timeout_s=5"]
    struck = run_struck(tmp_path / "run", strikes, overrides, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck)
    assert struck.restarts == {job: 1}
    assert list((tmp_path / "run" / "hangs").glob(f"*-{job}/status.json"))


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("job", ["actor_0", "preprocessor_0", "finetune_0", "actor_llm_0"])
def test_role_frozen_for_a_while_goes_on_without_a_restart(job: str, tmp_path: Path):
    strikes = [Strike(job=job, step=9, action="freeze", thaw_s=8.0)]
    struck = run_struck(tmp_path / "run", strikes, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck)
    assert struck.restarts == {}


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_server_killed_in_the_last_evaluation_gets_the_last_weights_back(tmp_path: Path):
    strikes = [Strike(job="actor_llm_0", step=STEPS, moment="evaluation")]
    struck = run_struck(tmp_path / "run", strikes, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck)


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_trainer_killed_in_the_last_evaluation_comes_back_to_look_after_the_servers(tmp_path: Path):
    strikes = [Strike(job=job, step=STEPS, moment="evaluation") for job in ("finetune_0", "actor_llm_0")]
    struck = run_struck(tmp_path / "run", strikes, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck)
    assert struck.restarts == {"finetune_0": 1, "actor_llm_0": 1}


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize(("job", "streams"), [("actor_llm_0", "files"), ("redis_0", "redis")])
def test_frozen_child_is_found_by_its_jobs_heartbeat(job: str, streams: str, tmp_path: Path):
    strikes = [Strike(job=job, step=9, action="freeze", child=True)]
    overrides = [f"streams={streams}", "launcher.heartbeat_timeout_s=10", "weights.timeout_s=5"]
    struck = run_struck(tmp_path / "run", strikes, overrides, timeout_s=RUN_TIMEOUT_S)
    assert_undisturbed(struck)
    assert struck.restarts == {job: 1}
