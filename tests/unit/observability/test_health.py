"""Who is to blame when nothing moves."""

from dataclasses import replace

import pytest

from pipelinerl.config.sections import LauncherSection
from pipelinerl.observability.health import find_failed, wait_chain
from pipelinerl.observability.status import StatusRecord, Wait

LIMITS = LauncherSection(
    max_restarts=2,
    restart_backoff_s=1,
    startup_timeout_s=60,
    stop_timeout_s=8,
    save_timeout_s=60,
    hang_timeout_s=100,
    heartbeat_timeout_s=20,
    engine="local",
    ray_address=None,
    lease_ttl_s=30,
    node_timeout_s=60,
    max_log_mb=1,
)
NOW = 10_000.0


def status(
    job: str, *, progress: float = 0, heartbeat: float = 0, count: int = 1, on: str | None = "", state="running"
):
    """Ages in seconds; `on=""` = not waiting, None = waiting for nobody in particular."""
    waits = () if on == "" else (Wait(what="something", on=on, since=NOW - progress),)
    return StatusRecord(
        job=job,
        state=state,
        pid=1,
        hostname="h",
        started=0.0,
        heartbeat=NOW - heartbeat,
        progress_at=NOW - progress,
        progress_count=count,
        waits=waits,
        fields={},
    )


def blamed(
    *statuses: StatusRecord, started: float = 1000.0, since: float = 0.0, jobs: tuple[str, ...] = ()
) -> dict[str, str]:
    names = jobs or tuple({s.job.partition(".")[0] for s in statuses})
    start = dict.fromkeys(names, NOW - started)
    return {v.job: v.reason for v in find_failed({s.job: s for s in statuses}, start, LIMITS, NOW, since)}


def test_judge_working_roles_are_fine() -> None:
    assert blamed(status("actor_0", progress=99), status("finetune_0", heartbeat=19)) == {}


def test_judge_silent_heartbeat_is_frozen() -> None:
    assert blamed(status("actor_0", heartbeat=21))["actor_0"].startswith("frozen: no heartbeat for 21 s")


def test_judge_silence_without_a_cpu_is_not_frozen() -> None:
    starving = {"actor_0": status("actor_0", heartbeat=30)}
    started = {"actor_0": NOW - 1000}
    assert find_failed(starving, started, LIMITS, NOW, 0.0, {"actor_0": 15.0}) == []
    (verdict,) = find_failed(starving, started, LIMITS, NOW, 0.0, {"actor_0": 5.0})
    assert verdict.reason.startswith("frozen: no heartbeat for 25 s")


def test_judge_silent_start_has_the_limit_of_starts() -> None:
    assert blamed(status("actor_0", heartbeat=50, count=0), started=55) == {}
    assert blamed(status("actor_0", heartbeat=50, count=0), started=61)["actor_0"].startswith("did not start within")


def test_judge_start_begins_when_the_launchers_model_is_built() -> None:
    waiting = status("actor_llm_0", count=0, on="launcher")
    assert blamed(waiting, started=1000) == {}
    assert blamed(replace(waiting, waits=(), started=NOW - 59), started=1000) == {}
    late = blamed(replace(waiting, waits=(), started=NOW - 61), started=1000)
    assert late["actor_llm_0"].startswith("did not start within")


def test_since_boot_clock_that_was_set_back_changes_nothing() -> None:
    import socket

    before = replace(status("actor_0", heartbeat=5), hostname=socket.gethostname(), clock_offset=1000.0)
    after = replace(before, heartbeat=before.heartbeat - 500, progress_at=before.progress_at - 500, clock_offset=500.0)
    assert before.since_boot(0.0).heartbeat == after.since_boot(0.0).heartbeat == NOW - 1005
    elsewhere = replace(before, hostname="another")
    assert elsewhere.since_boot(200.0).heartbeat == NOW - 205


def test_judge_silence_while_the_launcher_slept_proves_nothing() -> None:
    assert blamed(status("actor_0", heartbeat=500, progress=500), since=NOW - 5) == {}


def test_judge_stuck_role_is_named_with_the_setting() -> None:
    assert blamed(status("actor_0", progress=101)) == {
        "actor_0": "no progress for 101 s (launcher.hang_timeout_s=100)",
    }


def test_judge_blame_follows_the_chain_to_its_end() -> None:
    verdicts = blamed(
        status("actor_0", progress=150, on="finetune"),
        status("finetune_0", progress=140, on="preprocessor_0"),
        status("preprocessor_0", progress=130),
    )
    assert list(verdicts) == ["preprocessor_0"]


def test_judge_waiting_for_a_working_role_is_no_fault() -> None:
    assert blamed(status("actor_0", progress=500, on="finetune_0"), status("finetune_0", progress=50)) == {}


def test_judge_waiting_for_a_role_without_status_is_no_fault() -> None:
    assert blamed(status("actor_0", progress=500, on="finetune_0")) == {}


def test_judge_waiting_for_nobody_for_too_long_is_stuck() -> None:
    assert list(blamed(status("actor_0", progress=500, on=None))) == ["actor_0"]


def test_judge_circle_blames_who_stood_still_first() -> None:
    verdicts = blamed(
        status("actor_0", progress=150, on="finetune_0"),
        status("finetune_0", progress=170, on="preprocessor_0"),
        status("preprocessor_0", progress=160, on="actor_0"),
    )
    assert list(verdicts) == ["finetune_0"]


def test_judge_start_is_bounded_with_and_without_a_sign_of_life() -> None:
    assert "did not start within" in blamed(status("actor_llm_0", count=0, progress=61), started=61)["actor_llm_0"]
    assert blamed(status("actor_llm_0", count=0, progress=59), started=59) == {}
    assert "no sign of life" in blamed(started=61, jobs=("actor_llm_0",))["actor_llm_0"]
    assert blamed(started=59, jobs=("actor_llm_0",)) == {}


def test_judge_any_rank_of_a_job_fails_the_job() -> None:
    assert list(blamed(status("finetune_0"), status("finetune_0.rank1", heartbeat=30))) == ["finetune_0"]


@pytest.mark.parametrize("state", ["done", "failed"])
def test_judge_ended_roles_are_left_alone(state: str) -> None:
    assert blamed(status("actor_0", heartbeat=500, progress=500, state=state)) == {}


def waiting(job: str, on: str, *, progress: float, since: float) -> StatusRecord:
    """Last progress, and begin of the wait, as ages in seconds."""
    return replace(status(job, progress=progress, on=on), waits=(Wait(what="data", on=on, since=NOW - since),))


def first_data_after(seconds: float, **change: float) -> tuple[StatusRecord, ...]:
    """A run whose roles were ready `seconds` ago and whose server still samples the first answers."""
    return (
        waiting("finetune_0", "preprocessor", progress=seconds, since=seconds),
        waiting("preprocessor_0", "actor_0", progress=seconds, since=seconds),
        waiting("actor_0", "actor_llm_0", progress=seconds, since=seconds),
        status("actor_llm_0", progress=1),
    )


def test_judge_ready_roles_that_wait_for_the_first_data_are_never_blamed() -> None:
    """`startup_timeout_s` is 60 and `hang_timeout_s` 100: neither ends a run whose first answers take an hour."""
    for seconds in (61, 101, 3600):
        assert blamed(*first_data_after(seconds), started=seconds + 30) == {}


def test_judge_wait_for_the_first_data_ends_when_its_server_stands_still() -> None:
    *others, _ = first_data_after(3600)
    verdicts = blamed(*others, status("actor_llm_0", progress=101, on=None), started=3600)
    assert verdicts == {"actor_llm_0": "no progress for 101 s (launcher.hang_timeout_s=100)"}


def test_judge_work_is_measured_from_the_end_of_the_wait_for_its_data() -> None:
    working = replace(status("finetune_0", progress=3600), working_since=NOW - 99)
    assert blamed(working, started=3700) == {}
    stuck = replace(working, working_since=NOW - 101)
    assert blamed(stuck, started=3700)["finetune_0"].startswith("no progress for 101 s")


def test_judge_circle_that_has_just_closed_blames_nobody() -> None:
    """After an hour the first group has come, and waits a second for the weight probe of its server."""
    _, preprocessor, _, server = first_data_after(3600)
    trainer = waiting("finetune_0", "preprocessor", progress=3700, since=3600)
    actor = waiting("actor_0", "finetune_0", progress=3600, since=1)
    assert blamed(trainer, preprocessor, actor, server, started=3700) == {}
    closed = waiting("actor_0", "finetune_0", progress=3600, since=101)
    assert list(blamed(trainer, preprocessor, closed, server, started=3700)) == ["finetune_0"]


def test_judge_start_that_waits_for_another_role_is_the_others() -> None:
    actor = status("actor_0", count=0, progress=70, on="environment_0")
    environment = status("environment_0", count=0, progress=70)
    assert list(blamed(actor, environment, started=70)) == ["environment_0"]


def test_judge_starts_that_wait_for_each_other_are_a_circle() -> None:
    actor = status("actor_0", count=0, progress=101, on="finetune_0")
    assert blamed(actor, waiting("finetune_0", "actor_0", progress=101, since=99)) == {}
    assert list(blamed(actor, waiting("finetune_0", "actor_0", progress=102, since=101))) == ["finetune_0"]


def test_judge_rank_in_a_collective_moves_with_the_others() -> None:
    idle, busy = status("finetune_0.rank1", progress=500), status("finetune_0", progress=5)
    assert blamed(idle, busy) == {}
    assert blamed(idle, waiting("finetune_0", "actor_llm_0", progress=500, since=500), status("actor_llm_0")) == {}
    assert list(blamed(idle, status("finetune_0", progress=101))) == ["finetune_0"]


def test_wait_chain_is_told_in_order_and_ends_in_a_circle() -> None:
    statuses = {
        "a_0": status("a_0", on="b_0", progress=3),
        "b_0": status("b_0", on="c", progress=2),
        "c_0": status("c_0", on="a_0", progress=1),
        "d_0": status("d_0", on="c_0"),
    }
    assert wait_chain("d_0", statuses) == ["d_0", "c_0", "a_0", "b_0", "a_0"]
    assert wait_chain("c_0", {"c_0": status("c_0")}) == ["c_0"]
