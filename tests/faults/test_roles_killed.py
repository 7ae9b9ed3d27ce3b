"""One real run in which every role is killed once goes on by itself and trains every sample exactly once."""

from pathlib import Path

import pytest

from benchmarks.recovery import STEPS, Outcome, Strike, run_struck

RUN_TIMEOUT_S = 840.0


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    strikes = [
        Strike(job="actor_0", step=7),
        Strike(job="preprocessor_0", step=16, delay_s=0.1),
        Strike(job="finetune_0", step=29),
        Strike(job="finetune_0", step=38, moment="checkpoint"),
        Strike(job="actor_llm_0", step=46, child=True),
    ]
    overrides = ["finetune.save_checkpoint_steps=8", "launcher.max_restarts=5"]
    return run_struck(tmp_path_factory.mktemp("killed") / "run", strikes, overrides, timeout_s=RUN_TIMEOUT_S)


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_run_with_every_role_killed_ends_by_itself_with_nothing_lost_or_left(outcome: Outcome):
    assert outcome.problems == [], outcome.output[-4000:]
    assert outcome.exit_code == 0
    assert outcome.trained == STEPS * 64


def test_run_with_every_role_killed_restarts_exactly_those(outcome: Outcome):
    assert outcome.restarts == {"actor_0": 1, "preprocessor_0": 1, "finetune_0": 2, "actor_llm_0": 1}


def test_run_with_every_role_killed_learns_as_an_undisturbed_one(outcome: Outcome):
    assert outcome.success is not None
    assert outcome.success >= 0.6, outcome.output[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("job", ["actor_0", "preprocessor_0", "finetune_0", "actor_llm_0"])
def test_role_frozen_for_ever_is_restarted_and_the_run_ends(job: str, tmp_path: Path):
    strikes = [Strike(job=job, step=9, action="freeze")]
    overrides = ["finetune.save_checkpoint_steps=8", "launcher.heartbeat_timeout_s=10", "weights.timeout_s=5"]
    struck = run_struck(tmp_path / "run", strikes, overrides, timeout_s=RUN_TIMEOUT_S, min_success=0.6)
    assert struck.problems == [], struck.output[-4000:]
    assert struck.restarts == {job: 1}
    assert list((tmp_path / "run" / "hangs").glob(f"*-{job}/status.json"))


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("job", ["actor_0", "preprocessor_0", "finetune_0", "actor_llm_0"])
def test_role_frozen_for_a_while_goes_on_without_a_restart(job: str, tmp_path: Path):
    strikes = [Strike(job=job, step=9, action="freeze", thaw_s=8.0)]
    struck = run_struck(tmp_path / "run", strikes, timeout_s=RUN_TIMEOUT_S, min_success=0.6)
    assert struck.problems == [], struck.output[-4000:]
    assert struck.restarts == {}


@pytest.mark.slow
@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
def test_server_killed_in_the_last_evaluation_gets_the_last_weights_back(tmp_path: Path):
    strikes = [Strike(job="actor_llm_0", step=STEPS, moment="evaluation")]
    struck = run_struck(tmp_path / "run", strikes, timeout_s=RUN_TIMEOUT_S, min_success=0.6)
    assert struck.problems == [], struck.output[-4000:]
