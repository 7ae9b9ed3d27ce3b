"""The one type of what was found: its order, and its forms for people and programs."""

from pathlib import Path

from pipelinerl.inspect.finding import Finding, Level, as_json, found, lines

LATE = Finding(Level.STEP, "clip fraction", "the loss clips 40% of the tokens", "Lower the rate", step=7)
EARLY = Finding(Level.STEP, "mismatch", "they differ", "Look", "pipelinerl replay {run} --step {step}", step=2)
SERVER = Finding(Level.DELIVERY, "stale server", "a probe failed", "Restart it", about="actor_llm_1")


def test_found_tells_by_level_then_by_first_step() -> None:
    assert found([lambda _: [LATE], lambda _: [], lambda seen: [EARLY, seen]], SERVER) == [SERVER, EARLY, LATE]


def test_line_names_a_step_only_where_there_is_one() -> None:
    assert LATE.line() == "clip fraction since step 7: the loss clips 40% of the tokens. Lower the rate"
    assert SERVER.line() == "stale server: a probe failed. Restart it"


def test_lines_of_a_run_have_its_command() -> None:
    assert lines([EARLY, SERVER], Path("/r/a run")) == [
        "1. mismatch since step 2: they differ",
        "   look: pipelinerl replay '/r/a run' --step 2",
        "   do:   Look",
        "2. stale server: a probe failed",
        "   look: pipelinerl report '/r/a run'",
        "   do:   Restart it",
    ]
    assert lines([SERVER]) == ["1. stale server: a probe failed", "   do:   Restart it"]


def test_json_has_the_fields_of_a_run_only_for_a_run() -> None:
    assert as_json([EARLY], Path("RUN")) == [
        {
            "level": "step",
            "title": "mismatch",
            "evidence": "they differ",
            "fix": "Look",
            "command": "pipelinerl replay RUN --step 2",
            "step": 2,
            "about": "",
        }
    ]
    untried = Finding(Level.NOT_RUN, "serving", "no time")
    assert as_json([untried]) == [{"level": "not run", "title": "serving", "evidence": "no time", "fix": ""}]
