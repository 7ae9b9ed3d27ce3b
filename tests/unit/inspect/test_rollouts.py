"""`pipelinerl rollouts` on a run folder made by hand: filters, both sources, text and JSON."""

import base64
import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.inspect import rollouts, streams
from pipelinerl.inspect.page import build
from pipelinerl.inspect.page.build import collect
from pipelinerl.inspect.samples import read_tests, read_training
from pipelinerl.streams import set_streams_backend
from tests.run_folder import ATTEMPTS, GROUPS, Story, make_run
from tests.says import says


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("rollouts") / "run", Story(steps=8))


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert rollouts.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[dict]:
    return [json.loads(line) for line in printed(capsys, *arguments, "--json").splitlines()]


def test_text_marks_what_was_sampled_and_says_what_became_of_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = printed(capsys, run_dir, "--group", "0-15/1")
    first, *rest = out.splitlines()
    assert first.startswith("── 0-15/1  trained, step 7  largest/train  reward ")
    assert "advantage " in first
    assert "versions 6–7  lag 1" in first
    assert "   question: Which is the largest of 18, 5 and 30?" in rest
    assert "[user] Which is the largest of 18, 5 and 30? (7-1)" in rest
    assert any(line.startswith("[assistant] «I think it is ") and line.endswith("»") for line in rest)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m \u202egnp.exe\x00\r\n</script><b> \u2028 {{DATA}}"


def hostile_run(path: Path) -> Path:
    """A run whose model, problems, names and numbers are those of an enemy."""
    problem = '{"question": "\\ud800 \\u001b[2J", "n": NaN}'
    return make_run(path, Story(steps=3, said=HOSTILE, problem=problem, numbers=(float("inf"), float("nan"))))


def test_no_character_of_a_record_reaches_the_terminal_as_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = hostile_run(tmp_path / "run")
    out = printed(capsys, run_dir, "--all")
    assert "␛]0;owned" in out
    assert "�gnp.exe␀" in out
    assert [character for character in out if not (character.isprintable() or character in "\n\u2028")] == []
    assert len(as_json(capsys, run_dir, "--all")) == 3 * GROUPS * ATTEMPTS
    assert len(as_json(capsys, run_dir, "--grep", "owned.*gnp")) == 3 * GROUPS * ATTEMPTS


def test_page_of_hostile_records_is_json_and_has_null_for_what_is_no_number(tmp_path: Path) -> None:
    page = build.build_page([build.collect(hostile_run(tmp_path / "run"))]).decode()
    packed = page.partition('<script id="data" type="application/octet-stream">')[2].partition("</script>")[0]
    (found,) = json.loads(gzip.decompress(base64.b64decode(packed)), parse_constant=pytest.fail)["runs"]
    one = found["rollouts"][0]
    assert (one["reward"], one["metrics"]["odd"]) == (None, None)
    assert "owned" in "".join(one["sequences"][0]["pieces"])
    assert "\\ud800" in one["problem"]["problem"]


def test_step_has_every_rollout_once_from_archive_and_topic(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, run_dir, "--step", 2)
    assert sorted(one["sample_id"] for one in found) == [f"0-{g}/{a}" for g in (4, 5) for a in range(ATTEMPTS)]
    assert {one["fate"] for one in found} == {"trained"}
    assert any(one["advantages"] for one in found)
    assert any(not one["advantages"] for one in found), "what is not archived comes from the topic"
    everything = list(read_training(run_dir))
    assert len(everything) == len({seen.sample_id for seen in everything}) == 8 * GROUPS * ATTEMPTS


def test_run_whose_topics_are_trimmed_has_the_archive(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", Story(steps=6, kept_in_topic=False))
    found = list(read_training(run_dir))
    assert {seen.step for seen in found} == set(range(6))
    assert sum(seen.step == 5 for seen in found) == GROUPS * ATTEMPTS, "all of the last steps"
    assert ATTEMPTS <= sum(seen.step == 0 for seen in found) < GROUPS * ATTEMPTS
    score = next(seen.scores[0] for seen in found if seen.scores)
    assert score is not None
    assert all(
        len(seen.scores[0].logprobs) == seen.rollout.num_sampled for seen in found if seen.scores and seen.scores[0]
    )


def test_best_and_worst_are_by_reward(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, worst = (as_json(capsys, run_dir, option, 3) for option in ("--best", "--worst"))
    assert [one["reward"] for one in best] == [1.0] * 3
    assert [one["reward"] for one in worst] == [0.0] * 3


def test_grep_and_domain_select(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, run_dir, "--grep", r"\(3-1\)")
    assert {one["sample_id"] for one in found} == {f"0-7/{attempt}" for attempt in range(ATTEMPTS)}
    assert as_json(capsys, run_dir, "--domain", "elsewhere") == []
    assert "no rollout matches" in printed(capsys, run_dir, "--domain", "elsewhere")
    with pytest.raises(ConfigError, match=says("--grep", "'('", "regular expression")):
        rollouts.main([str(run_dir), "--grep", "("])


def test_test_shows_evaluations_and_step_is_their_version(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {seen.group_id for seen in read_tests(run_dir)} == {"test-0-test-0", "test-4-test-0"}
    found = as_json(capsys, run_dir, "--test", "--domain", "test")
    assert len(found) == 2 * ATTEMPTS
    assert {one["fate"] for one in found} == {"evaluation"}


def test_last_is_the_default_and_the_newest(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, run_dir, "--last", 2)
    assert out.count("── ") == 2
    assert len(as_json(capsys, run_dir, "--last", 1)) == 1
    assert len(as_json(capsys, run_dir)) > 2


def test_run_without_a_tokenizer_shows_token_ids(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("model"))
    config = tmp_path / "run" / "conf" / "config.yaml"
    config.write_text(config.read_text().replace(str(run_dir / "model"), str(tmp_path / "gone")))
    assert rollouts.main([str(tmp_path / "run"), "--last", "1"]) == 0
    captured = capsys.readouterr()
    assert re.search(says(tmp_path / "gone", "token ids"), captured.err)
    assert "«" in captured.out


def test_streams_tail_text_shows_conversations(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert streams.main(["tail", str(run_dir), "actor", "--last", "1", "--text"]) == 0
    out = capsys.readouterr().out
    assert out.count("── 0-15/") == ATTEMPTS
    assert "[assistant] «" in out
    with pytest.raises(StreamError, match=says("--text", "actor", "actor_test", "trainer")):
        streams.main(["tail", str(run_dir), "trainer", "--text"])


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not on PATH: `make redis`")
def test_run_on_redis_that_has_ended_is_read_as_one_on_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIPELINERL_REDIS_PASSWORD", raising=False)
    run_dir = make_run(tmp_path / "run", Story(steps=3, overrides=("streams=redis",)))
    found = as_json(capsys, run_dir, "--step", 0)
    assert sorted(one["sample_id"] for one in found) == [f"0-{g}/{a}" for g in (0, 1) for a in range(ATTEMPTS)]
    assert len(as_json(capsys, run_dir, "--test", "--all")) == ATTEMPTS
    page = collect(run_dir)
    assert page["state"] == "finished, 3 steps"
    assert len(page["rollouts"]) == 3 * GROUPS * ATTEMPTS + ATTEMPTS


@pytest.fixture(autouse=True)
def files() -> None:
    set_streams_backend("files")


def test_twenty_rollouts_are_printed_without_an_option(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, run_dir).count("── ") == 20
