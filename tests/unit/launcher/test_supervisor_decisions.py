"""What an exit means, in which order kinds are stopped, how long a restart waits."""

import pytest

from pipelinerl.config.sections import LauncherSection
from pipelinerl.launcher.exits import decide_after_exit, restart_delay_s
from pipelinerl.launcher.stopping import stop_waves

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


@pytest.mark.parametrize(
    ("kind", "code", "training_done", "restarts", "action"),
    [
        ("actor", 0, True, 0, "done"),
        ("actor", 0, False, 0, "restart"),
        ("finetune", 0, True, 0, "done"),
        ("finetune", 0, False, 0, "restart"),
        ("finetune", -9, False, 0, "restart"),
        ("finetune", -9, False, 1, "restart"),
        ("finetune", -9, False, 2, "fail"),
        ("finetune", -9, True, 0, "restart"),
        ("finetune", -9, True, 2, "done"),
        ("finetune", 2, True, 0, "done"),
        ("preprocessor", -9, True, 0, "done"),
        ("preprocessor", 0, False, 0, "done"),
        ("preprocessor", 1, False, 0, "restart"),
        ("actor", 1, True, 0, "restart"),
        ("actor", 2, False, 0, "fail"),
        ("actor_llm", 0, False, 0, "restart"),
        ("actor_llm", 1, True, 0, "restart"),
        ("verifier", 0, True, 0, "restart"),
    ],
)
def test_exit_follows_the_table(kind: str, code: int, training_done: bool, restarts: int, action: str) -> None:
    decision = decide_after_exit(kind, code, None, training_done=training_done, restarts_used=restarts, limits=LIMITS)
    assert decision.action == action


def test_roles_alone_end_by_themselves() -> None:
    rest = {"training_done": False, "restarts_used": 0, "limits": LIMITS, "alone": True}
    kinds = ("actor", "finetune", "preprocessor", "actor_llm")
    assert [decide_after_exit(kind, 0, None, **rest).action for kind in kinds] == ["done"] * 3 + ["restart"]
    assert decide_after_exit("actor", 1, None, **rest).action == "restart"
    assert decide_after_exit("actor", 2, None, **rest).action == "fail"


def test_exit_names_signal_budget_and_reason() -> None:
    killed = decide_after_exit("actor", -9, None, training_done=False, restarts_used=2, limits=LIMITS)
    assert killed.reason == "killed by SIGKILL, and launcher.max_restarts=2 is used up"
    hung = decide_after_exit("actor", -9, "no progress for 120 s", training_done=False, restarts_used=0, limits=LIMITS)
    assert (hung.action, hung.reason) == ("restart", "no progress for 120 s")


def test_stop_waves_stores_outlive_everybody() -> None:
    kinds = {"actor", "actor_llm", "finetune", "redis", "verifier"}
    assert stop_waves(kinds, orderly=True) == [{"actor", "finetune"}, {"actor_llm", "verifier"}, {"redis"}]
    assert stop_waves(kinds, orderly=False) == [{"actor", "finetune", "actor_llm", "verifier"}, {"redis"}]


def test_backoff_doubles_up_to_its_bound() -> None:
    assert [restart_delay_s(restarts, 1.0) for restarts in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert restart_delay_s(3, 60.0) == 60.0
