"""What a loss means, in which order kinds are stopped, how long a restart waits."""

import pytest

from pipelinerl.launcher.engine import stop_in_waves
from pipelinerl.launcher.losses import (
    Decision,
    LeaderLost,
    LeasesAway,
    NodeLost,
    ProcessLost,
    decide,
    may_be_missing,
    restart_delay_s,
)
from tests.unit.observability.test_health import LIMITS


def after_exit(kind: str, code: int, restarts_used: int = 0, **fields) -> Decision:
    return decide(ProcessLost(kind=kind, code=code, restarts_used=restarts_used, max_restarts=2, **fields))


def after_node(*kinds: str, elsewhere: tuple[str, ...] = (), **fields) -> Decision:
    return decide(NodeLost(name="node 1 (b)", kinds=kinds, elsewhere=elsewhere, **fields))


@pytest.mark.parametrize(
    ("kind", "code", "training_done", "restarts", "action"),
    [
        ("actor", 0, True, 0, "continue"),
        ("actor", 0, False, 0, "restart"),
        ("finetune", 0, True, 0, "continue"),
        ("finetune", 0, False, 0, "restart"),
        ("finetune", -9, False, 0, "restart"),
        ("finetune", -9, False, 1, "restart"),
        ("finetune", -9, False, 2, "end"),
        ("finetune", -9, True, 0, "restart"),
        ("finetune", -9, True, 2, "continue"),
        ("finetune", 2, True, 0, "continue"),
        ("preprocessor", -9, True, 0, "continue"),
        ("preprocessor", 0, False, 0, "continue"),
        ("preprocessor", 1, False, 0, "restart"),
        ("actor", 1, True, 0, "restart"),
        ("actor", 2, False, 0, "end"),
        ("actor", 3, False, 0, "restart"),
        ("actor", 3, True, 0, "restart"),
        ("finetune", 3, False, 0, "restart"),
        ("finetune", 3, False, 2, "end"),
        ("preprocessor", 3, False, 0, "restart"),
        ("verifier", 3, False, 0, "restart"),
        ("environment", 3, False, 0, "restart"),
        ("preprocessor_llm", 3, False, 2, "continue"),
        ("actor_llm", 0, False, 0, "restart"),
        ("actor_llm", 1, True, 0, "restart"),
        ("verifier", 0, True, 0, "restart"),
    ],
)
def test_exit_decides_by_kind_code_and_budget(
    kind: str, code: int, training_done: bool, restarts: int, action: str
) -> None:
    assert after_exit(kind, code, restarts, is_training_done=training_done).action == action


def test_standalone_roles_end_by_themselves() -> None:
    kinds = ("actor", "finetune", "preprocessor", "actor_llm")
    assert [after_exit(kind, 0, is_standalone=True).action for kind in kinds] == ["continue"] * 3 + ["restart"]
    assert after_exit("actor", 1, is_standalone=True).action == "restart"
    assert after_exit("actor", 2, is_standalone=True).action == "end"


def test_exit_names_signal_budget_and_reason() -> None:
    spent = "killed by SIGKILL, and launcher.max_restarts=2 is used up"
    assert after_exit("actor", -9, 2) == Decision(action="end", reason=spent, is_spent=True)
    assert after_exit("actor", 2, 2) == Decision(action="end", reason="exit code 2, which a restart cannot mend")
    hung = Decision(action="restart", reason="no progress for 120 s")
    assert after_exit("actor", -9, kill_reason="no progress for 120 s") == hung
    assert after_exit("actor", 0).reason == "it ended before the run did"


def test_server_that_left_is_not_started_again_unless_the_launcher_killed_it() -> None:
    assert after_exit("actor_llm", 3) == Decision(action="continue", reason="it left the run on request")
    assert after_exit("actor_llm", 3, kill_reason="frozen").action == "restart"


@pytest.mark.parametrize(
    ("kinds", "elsewhere", "expected"),
    [
        (("actor_llm", "preprocessor_llm", "actor_llm_part"), (), True),
        ((), (), True),
        (("verifier",), ("verifier", "finetune"), True),
        (("verifier",), ("finetune",), False),
        (("actor_llm", "finetune"), ("finetune",), False),
        (("actor",), ("actor",), False),
        (("preprocessor",), (), False),
        (("redis",), (), False),
        (("environment",), ("environment",), False),
    ],
)
def test_roles_that_may_join_may_be_missing(kinds: tuple[str, ...], elsewhere: tuple[str, ...], expected: bool) -> None:
    assert may_be_missing(kinds, elsewhere) is expected
    assert (after_node(*kinds, elsewhere=elsewhere).action == "continue") is expected


@pytest.mark.parametrize("kind", ["actor_llm", "actor", "preprocessor", "finetune", "actor_llm_part"])
def test_platform_moves_every_role_that_others_find_again(kind: str) -> None:
    moved = after_node(kind, is_placed_again=True)
    assert moved == Decision(action="move", reason="node 1 (b) is lost")


@pytest.mark.parametrize("kind", ["redis", "environment", "verifier"])
def test_role_with_a_fixed_address_cannot_move(kind: str) -> None:
    ended = after_node(kind, is_placed_again=True)
    assert (ended.action, ended.ending, ended.exit_code, ended.is_cut_off) == ("end", "failed", 1, False)
    assert ended.reason == f"node 1 (b) is lost, and other roles know its {kind} by that address only"


def test_end_of_a_node_names_it_and_how_it_ended() -> None:
    cut = "node 1 (b) has been silent for 60 s"
    lost = after_node("finetune", reason="has been silent for 60 s")
    assert lost == Decision(action="end", reason=cut, is_cut_off=True), "no rank can save"
    assert not after_node("actor", reason="has been silent for 60 s").is_cut_off, "all ranks can save"
    failed = after_node("finetune", how="failed", reason="why")
    assert failed == Decision(action="end", reason="node 1 (b): why")
    assert after_node("actor_llm", how="failed", reason="why").reason == "node 1 (b) has failed: why"
    assert after_node("actor_llm", how="refused", reason="no") == Decision(action="end", reason="no")
    assert after_node("actor_llm", how="done") == Decision(action="end", ending="done")


@pytest.mark.parametrize(
    ("signal", "action", "code"), [("SIGTERM", "continue", 143), ("SIGHUP", "continue", 129), ("SIGINT", "end", 130)]
)
def test_node_of_servers_is_stopped_alone_but_not_by_ctrl_c(signal: str, action: str, code: int) -> None:
    assert after_node("actor_llm", how="stopped", reason=signal).action == action
    ended = after_node("actor_llm", "actor", how="stopped", reason=signal)
    assert (ended.action, ended.ending, ended.exit_code) == ("end", "stopped", code)


def test_follower_ends_as_its_leader() -> None:
    def after(how, reason: str) -> Decision:
        return decide(LeaderLost(name="node 0 (a)", how=how, reason=reason))

    assert after("lost", "is silent") == Decision(action="end", reason="node 0 (a) is silent", is_cut_off=True)
    assert after("stopped", "SIGTERM") == Decision(action="end", ending="stopped", reason="SIGTERM")
    assert after("failed", "why") == Decision(action="end", reason="node 0 (a): why")
    assert (after("done", "").ending, after("done", "").exit_code) == ("done", 0)


def test_leases_that_cannot_be_read_are_awaited_up_to_the_limit() -> None:
    def after(away_s: float) -> Decision:
        return decide(LeasesAway(leader="node 0 (a)", place="results/x", away_s=away_s, limit_s=30.0))

    assert after(29.9).action == "wait"
    ended = after(30.0)
    assert (ended.action, ended.exit_code, ended.is_cut_off) == ("end", 1, True)
    assert ended.reason.startswith("node 0 (a) is lost: the leases in results/x could not be read for 30 s")


@pytest.mark.parametrize(
    ("orderly", "waves"),
    [
        (True, [({"actor", "finetune"}, 8.0), ({"actor_llm", "verifier"}, 8.0), "report", ({"redis"}, 8.0)]),
        (False, [({"actor", "finetune", "actor_llm", "verifier"}, 8.0), ({"redis"}, 1.6)]),
    ],
)
def test_stores_are_stopped_last_and_after_the_report_of_a_complete_run(orderly: bool, waves: list[object]) -> None:
    seen: list[object] = []
    stop_in_waves(
        ["actor", "actor_llm", "finetune", "redis", "verifier"],
        lambda kinds, limit_s: seen.append((kinds, limit_s)),
        LIMITS,
        orderly=orderly,
        report=lambda: seen.append("report"),
    )
    assert seen == waves


def test_backoff_doubles_up_to_its_bound() -> None:
    assert [restart_delay_s(restarts, 1.0) for restarts in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert restart_delay_s(3, 60.0) == 60.0
