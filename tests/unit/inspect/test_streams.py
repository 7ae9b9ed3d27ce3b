"""`python -m pipelinerl.streams`: what it prints is what is there, and it leaves no trace."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipelinerl.errors import StreamError
from pipelinerl.inspect import streams as command
from pipelinerl.records import RolloutGroup
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from tests.says import says


@pytest.fixture
def run_dir(tmp_path: Path, make_group: Callable[..., RolloutGroup]) -> Path:
    """A run with 12 groups of actor 0 and one of actor 1."""
    set_streams_backend("files", fsync="never")
    for instance, count in ((0, 12), (1, 1)):
        spec = SingleStreamSpec(tmp_path, "actor", instance)
        with open_writer(spec, RolloutGroup) as writer:
            for seed in range(count):
                writer.write(make_group(seed=seed))
    spec = SingleStreamSpec(tmp_path, "actor")
    with open_reader(spec, RolloutGroup, name="preprocessor_0") as reader:
        reader.commit(7)
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int, str]]:
    lines = map(json.loads, capsys.readouterr().out.splitlines())
    return [(line["stream"], line["offset"], line["record"]["group_id"]) for line in lines]


def test_tail_prints_the_last_records_of_every_stream_of_the_topic(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["tail", str(run_dir), "actor", "--last", "2"]) == 0
    assert printed(capsys) == [("actor/0/0", 10, "0-10"), ("actor/0/0", 11, "0-11"), ("actor/1/0", 0, "0-0")]
    assert command.main(["tail", str(run_dir), "actor/1/0"]) == 0
    assert printed(capsys) == [("actor/1/0", 0, "0-0")]


def test_tail_from_an_offset_prints_whole_records(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["tail", str(run_dir), "actor/0/0", "--from", "0"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["offset"] for line in lines] == list(range(12))
    sequence = lines[0]["record"]["rollouts"][0]["sequences"][0]
    assert len(sequence["token_ids"]) == 6
    assert sequence["spans"] == [[2, 6, 3]]


def test_tail_follow_goes_on_with_records_that_come(
    tmp_path: Path,
    make_group: Callable[..., RolloutGroup],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    calls = []
    print_new = command._print_new

    def interrupted_after_a_record(*args: object) -> bool:
        calls.append(print_new(*args))  # type: ignore[arg-type]
        if any(calls):
            raise KeyboardInterrupt
        return calls[-1]

    def write() -> None:
        with open_writer(SingleStreamSpec(tmp_path, "actor"), RolloutGroup) as writer:
            writer.write(make_group(seed=3))

    monkeypatch.setattr(command, "_print_new", interrupted_after_a_record)
    timer = threading.Timer(0.1, write)
    timer.start()
    assert command.main(["tail", str(tmp_path), "actor", "--follow"]) == 0
    timer.join()
    assert printed(capsys) == [("actor/0/0", 0, "0-3")]


def test_text_tells_training_and_evaluation_by_the_topic_whatever_the_domain_is_called(
    tmp_path: Path, make_group: Callable[..., RolloutGroup], capsys: pytest.CaptureFixture[str]
):
    set_streams_backend("files", fsync="never")
    group = msgspec.structs.replace(make_group(), group_id="test-0-5", domain="test")
    for topic in ("actor", "actor_test"):
        with open_writer(SingleStreamSpec(tmp_path, topic), RolloutGroup) as writer:
            writer.write(group)
    shown = {}
    for topic in ("actor", "actor_test"):
        assert command.main(["tail", str(tmp_path), topic, "--text"]) == 0
        shown[topic] = capsys.readouterr().out
    assert "published" in shown["actor"]
    assert "evaluation" not in shown["actor"]
    assert "evaluation" in shown["actor_test"]


def test_stats_count_streams(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert command.main(["stats", str(run_dir), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    size = sum(path.stat().st_size for path in (run_dir / "streams/actor/0/0").glob("*.log"))
    assert rows[0] == {
        "stream": "actor/0/0",
        "first_offset": 0,
        "next_offset": 12,
        "size_bytes": size,
        "positions": {"preprocessor_0": 7},
    }
    assert command.main(["stats", str(run_dir)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["stream", "first", "next", "stored", "bytes", "readers:", "position", "(behind)"]
    assert table[1].split() == ["actor/0/0", "0", "12", "12", f"{size:,}", "preprocessor_0:", "7", "(5)"]
    assert table[2].split()[:4] == ["actor/1/0", "0", "1", "1"]


def test_commands_leave_no_trace(run_dir: Path):
    before = sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*"))
    command.main(["tail", str(run_dir), "actor"])
    command.main(["stats", str(run_dir)])
    assert sorted((path, path.stat().st_mtime_ns) for path in run_dir.rglob("*")) == before


def test_unknown_topic_and_folder_are_named(run_dir: Path):
    with pytest.raises(StreamError, match=says("'actr'", "actor/0/0, actor/1/0")):
        command.main(["tail", str(run_dir), "actr"])
    with pytest.raises(StreamError, match=says(run_dir / "nowhere", "run folder")):
        command.main(["stats", str(run_dir / "nowhere")])
