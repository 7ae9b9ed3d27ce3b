"""What `pipelinerl why` reads of a run folder, and prints."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.inspect.samples import SeenRollout
from pipelinerl.inspect.why.__main__ import main
from pipelinerl.inspect.why.evidence import drifts_of, goes_on, is_full, share_asked
from pipelinerl.records import Rollout, ScoredSequence, TrainingSequence
from pipelinerl.streams import set_streams_backend
from tests.run_folder import Story, make_run

N = 40
QUESTION = "Which is the largest of 18, 5 and 30?"


def problem(**fields: object) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize(
    ("prompt", "share"),
    [
        (f"<|user|>{QUESTION}<|end|>", 1.0),
        (f"<|user|>{QUESTION[:19]} and so on", 19 / 37),
        (f"<|user|>… {QUESTION[-24:]}", 24 / 37),
        ("<|user|>Which\n is the   largest of 18, 5 and 30?", 1.0),
        ("<|user|>Something else", 0.0),
    ],
)
def test_share_of_the_question_that_a_prompt_holds(prompt: str, share: float) -> None:
    solution = "The largest of 18, 5 and 30 is the last one, 30."
    asked = share_asked(problem(question=QUESTION, solution=solution, id=3), prompt)
    assert asked == pytest.approx(share, abs=0.03)


def test_a_text_too_short_to_miss_says_nothing() -> None:
    assert share_asked(problem(question="2 + 2", answer="four"), "Add two and two.") is None
    assert share_asked("not JSON, and cut", "not JSON, and cut somewhere") == 1.0


def test_a_text_of_sixteen_characters_is_looked_for_and_a_fifth_of_it_is_no_accident() -> None:
    assert share_asked(problem(question="a" * 15), "b") is None
    assert share_asked(problem(question="a" * 16), "b") == 0.0
    text = "".join(chr(0x4E00 + place) for place in range(100))
    assert share_asked(problem(question=text), text[:19]) == 0.0
    assert share_asked(problem(question=text), text[:21]) == 0.21


def test_an_end_inside_a_completion_is_no_end() -> None:
    """Tokens 3 to 8 are one completion of two versions, 9 to 11 another; 7 ends an answer."""

    def sequence(*token_ids: int) -> TrainingSequence:
        spans = np.array([[3, 5, 0], [5, 8, 1], [9, 11, 1]], np.int32)
        return TrainingSequence(
            token_ids=np.array(token_ids, np.int32),
            logprobs=-np.ones(7, np.float32),
            spans=spans,
            finish_reason="stop",
        )

    assert not goes_on(sequence(7, 1, 1, 1, 1, 1, 1, 7, 7, 1, 7), {7})
    assert goes_on(sequence(1, 1, 1, 1, 7, 1, 1, 1, 1, 1, 7), {7})


@pytest.mark.parametrize(
    ("longest", "reason", "full"),
    [(11, "length", True), (12, "length", False), (11, "stop", False), (None, "length", False)],
)
def test_answer_that_ends_with_the_context_filled_it(longest: int | None, reason: str, full: bool) -> None:
    sequence = TrainingSequence(
        token_ids=np.zeros(11, np.int32),
        logprobs=-np.ones(2, np.float32),
        spans=np.array([[9, 11, 0]], np.int32),
        finish_reason=reason,
    )
    assert is_full(sequence, longest) is full


def test_a_good_run_is_silent(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    set_streams_backend("files")
    assert main([str(make_run(tmp_path / "run", Story(steps=N)))]) == 0
    assert capsys.readouterr().out.startswith("nothing looks wrong")


def test_groups_that_any_actor_gave_up_count(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    set_streams_backend("files")
    run = make_run(tmp_path / "run", Story(steps=N, overrides=("world.replicas=2",)))
    point = {"step": N, "time": 0.0, "groups": 20, "groups_dropped/verifier": 1000}
    (run / "metrics" / "actor_1.jsonl").write_text(json.dumps(point) + "\n", encoding="utf-8")
    assert main([str(run), "--json"]) == 1
    first, *_ = json.loads(capsys.readouterr().out)
    assert first["title"] == "judge down"


def test_causes_have_their_evidence_a_command_and_a_fix(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The reward is −1 whatever becomes of a problem, and the servers hold other weights than they say."""
    set_streams_backend("files")
    story = Story(steps=N, finetune={"logratio_abs_max_lag0": [3.0] * N})
    run = make_run(tmp_path / "a run", story)
    assert main([str(run)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "1. stale server since step 1: tokens that the present weights sampled differ by up to 3"
    )
    assert lines[1] == f"   look: pipelinerl status '{run}'"
    assert lines[2].startswith("   do:   Keep weights.probe on")
    assert main([str(run), "--json"]) == 1
    (cause,) = json.loads(capsys.readouterr().out)
    assert (cause["title"], cause["level"]) == ("stale server", "delivery")


def test_drift_compares_the_first_eight_tokens_of_an_answer() -> None:
    """Ten tokens each, of two versions in the same contexts: the ninth and tenth are left out."""

    def seen(version: int, *, logprob: float, step: int | None = None, score: float | None = None) -> SeenRollout:
        sequence = TrainingSequence(
            token_ids=np.arange(12, dtype=np.int32),
            logprobs=np.full(10, logprob, np.float32),
            spans=np.array([[2, 12, version]], np.int32),
            finish_reason="stop",
        )
        scores = () if score is None else (np.full(10, score, np.float32),)
        return SeenRollout(
            group_id="0-0",
            domain="d",
            dataset="test",
            problem="{}",
            rollout=Rollout(attempt=0, reward=0.0, sequences=(sequence,), metrics={}, latency_s=1.0, num_llm_calls=1),
            outcome="evaluation" if step is None else "trained",
            step=step,
            dispatched_version=version,
            scores=tuple(ScoredSequence(sequence_id="", logprobs=s, entropy=s, altered=s > 0) for s in scores),
        )

    tests = [seen(0, logprob=-1.0), seen(4, logprob=-1.5)]
    (drift,) = drifts_of(tests, [seen(1, logprob=-1.0, step=2, score=-1.25)])
    assert (drift.first, drift.last, drift.contexts) == (0, 4, 8)
    assert (drift.change, drift.apart) == (0.5, 0.25)
