"""Every cell of the table in docs/cluster.md that says what a loss does is what the one function decides."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelinerl.launcher.losses import FIXED, LeaderLost, LeasesAway, Loss, NodeLost, ProcessLost, decide

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cluster.md"
PLACES = ("one machine", "a launcher on each node", "Ray")
BUDGET = {"restarts_used": 0, "max_restarts": 3}
SPENT = {"restarts_used": 3, "max_restarts": 3}


def everywhere(*losses: Loss) -> Mapping[str, tuple[Loss, ...]]:
    return dict.fromkeys(PLACES, losses)


def peers_only(*losses: Loss) -> Mapping[str, tuple[Loss, ...]]:
    return {"a launcher on each node": losses}


def node(*kinds: str, elsewhere: tuple[str, ...] = ("finetune",), **fields) -> NodeLost:
    return NodeLost(**{"name": "node 1", "kinds": kinds, "elsewhere": elsewhere} | fields)


def on_peers_and_ray(kinds: tuple[str, ...], **fields) -> Mapping[str, tuple[Loss, ...]]:
    """A node with a server and one of these roles is lost. Ray loses its roles one by one."""
    alone = tuple(node("actor_llm", kind, **fields) for kind in kinds)
    moved = tuple(node(kind, is_placed_again=True, **fields) for kind in kinds)
    return {"a launcher on each node": alone, "Ray": moved}


def leader(how: str = "lost", reason: str = "why") -> Mapping[str, tuple[Loss, ...]]:
    return peers_only(LeaderLost(name="node 0", how=how, reason=reason))


def leases_away(away_s: float) -> Mapping[str, tuple[Loss, ...]]:
    return peers_only(LeasesAway(leader="node 0", place="results/x", away_s=away_s, limit_s=60.0))


SERVERS, WORKERS = ("actor_llm", "preprocessor_llm"), ("finetune", "actor", "preprocessor")
STORES = tuple(kind for kind in FIXED if kind != "verifier")
KINDS = (*SERVERS, *WORKERS, *FIXED)
DONE = {"is_training_done": True}
ROWS: Mapping[str, Mapping[str, tuple[Loss, ...]]] = {
    "a process ends badly or hangs, within `launcher.max_restarts`": everywhere(
        *(ProcessLost(kind=kind, code=code, **BUDGET) for kind in KINDS for code in (1, -9)),
        *(ProcessLost(kind=kind, code=-9, kill_reason="no progress for 9 s", **BUDGET) for kind in KINDS),
    ),
    "the same, when the restarts are used up": everywhere(
        *(ProcessLost(kind=kind, code=-9, **SPENT) for kind in KINDS)
    ),
    "a process refuses its configuration (exit code 2)": everywhere(
        *(ProcessLost(kind=kind, code=2, **BUDGET) for kind in KINDS)
    ),
    "a process finds its disk full (exit code 4)": everywhere(
        *(ProcessLost(kind=kind, code=4, **budget) for kind in KINDS for budget in (BUDGET, SPENT))
    ),
    "an actor or the trainer exits with 0 before the run is done": everywhere(
        *(ProcessLost(kind=kind, code=0, **BUDGET) for kind in ("actor", "finetune"))
    ),
    "a server that was asked to leave (exit code 3)": everywhere(
        *(ProcessLost(kind=kind, code=3, **budget) for kind in SERVERS for budget in (BUDGET, SPENT))
    ),
    "the preprocessor after training was done": everywhere(
        *(ProcessLost(kind="preprocessor", code=code, **BUDGET, **DONE) for code in (0, 1, -9))
    ),
    "the trainer after training was done, when the restarts are used up": everywhere(
        ProcessLost(kind="finetune", code=1, **SPENT, **DONE)
    ),
    "a node with servers": {
        "a launcher on each node": (node(*SERVERS),),
        "Ray": tuple(node(kind, is_placed_again=True) for kind in SERVERS),
    },
    "a node with trainer ranks, an actor or a preprocessor": on_peers_and_ray(WORKERS, elsewhere=WORKERS),
    "a node with Redis or an environment": on_peers_and_ray(STORES, elsewhere=STORES),
    "a node with a verifier, and another node has one": on_peers_and_ray(("verifier",), elsewhere=("verifier",)),
    "a node with the only verifier": on_peers_and_ray(("verifier",)),
    "the launcher of a node with servers fails": peers_only(node(*SERVERS, how="failed", reason="why")),
    "the launcher of any other node fails": peers_only(
        *(node("actor_llm", kind, how="failed", reason="why") for kind in (*WORKERS, *FIXED))
    ),
    "SIGTERM or SIGHUP to the launcher of a node with servers": peers_only(
        *(node(*SERVERS, how="stopped", reason=signal) for signal in ("SIGTERM", "SIGHUP"))
    ),
    "SIGTERM to the launcher of any other node": peers_only(
        *(node("actor_llm", kind, how="stopped", reason="SIGTERM") for kind in (*WORKERS, *FIXED))
    ),
    "Ctrl-C to the launcher of any node": peers_only(
        *(node(kind, how="stopped", reason="SIGINT") for kind in KINDS),
        LeaderLost(name="node 0", how="stopped", reason="SIGINT"),
    ),
    "a node has another configuration": peers_only(*(node(kind, how="refused", reason="why") for kind in KINDS)),
    "the leading launcher is silent": leader(reason="has been silent for 60 s"),
    "the leading launcher was started again": leader(reason="was started again"),
    "the leading launcher fails": leader("failed"),
    "the leading launcher is stopped by SIGTERM": leader("stopped", "SIGTERM"),
    "the leading launcher has completed the run": leader("done", ""),
    "the leases cannot be read": leases_away(59.0),
    "the same for too long": leases_away(60.0),
}


def rows_of_the_page() -> dict[str, dict[str, str]]:
    section = PAGE.read_text().partition("## What a loss does\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    header, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(header[1:]) == PLACES
    return {row[0]: dict(zip(PLACES, row[1:], strict=True)) for row in rows}


def test_table_has_the_rows_of_this_test_and_no_other() -> None:
    assert list(rows_of_the_page()) == list(ROWS)


@pytest.mark.parametrize(("row", "place"), [(row, place) for row in ROWS for place in PLACES])
def test_cell_is_what_the_function_decides(row: str, place: str) -> None:
    cell = rows_of_the_page()[row][place]
    decisions = [decide(loss) for loss in ROWS[row].get(place, ())]
    said = {f"end {each.exit_code}" if each.action == "end" else each.action for each in decisions}
    found = re.match(r"\*\*(\w+(?: \d+)?)\*\*|–$", cell)
    assert found, cell
    assert said == ({found[1]} if found[1] else set())
