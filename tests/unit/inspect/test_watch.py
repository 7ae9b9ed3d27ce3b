"""Alarms of a run that goes on: told once, from what was written since, also after a resumed trainer cut its file."""

import json
import re
import threading
import time
from pathlib import Path

from pipelinerl.inspect.series import Series
from pipelinerl.inspect.why.watch import AlarmWatch, MetricsTail
from pipelinerl.launcher.following import TopicFollower
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.records import CalibrationExceeded, ProbeMissed, SamplesProcessed, TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.evidence import config
from tests.says import says

MISS = ProbeMissed(server="actor_llm_1", version=7, since=6, is_final=True, reason="bytes differ")


def write(path: Path, clipped: list[float], *, mode: str = "a") -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open(mode) as file:
        file.writelines(json.dumps({"step": i, "clip_fraction": c, "loss": 1.0}) + "\n" for i, c in enumerate(clipped))


def test_tail_reads_what_is_new_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics" / "finetune.jsonl"
    series = Series()
    tail = MetricsTail(tmp_path, "finetune", series)

    def clipped() -> tuple[list, ...]:
        tail.read()
        return series.of(TrainerMetric.CLIP_FRACTION)

    assert clipped() == ([], [])
    write(path, [0.1])
    with path.open("a") as file:
        file.write('{"step": 1, "clip_fr')
    assert clipped() == ([0], [0.1])
    with path.open("a") as file:
        file.write('action": 0.2}\n')
    assert clipped() == ([0, 1], [0.1, 0.2])
    write(path, [0.3], mode="w")
    assert clipped() == ([0], [0.3])


def test_tail_leaves_out_a_line_that_is_no_point(tmp_path: Path) -> None:
    """A damaged line may be JSON of another kind."""
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "finetune.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\n4\n\xff\n{"step": 2, "loss": 1.0}\n'
    )
    series = Series()
    MetricsTail(tmp_path, "finetune", series).read()
    assert series.of(TrainerMetric.LOSS) == ([1, 2], [2.0, 1.0])


def test_new_tells_every_alarm_once(tmp_path: Path) -> None:
    watch = AlarmWatch(tmp_path, config(), every_s=0.0)
    assert watch.new() == []
    write(tmp_path / "metrics" / "finetune.jsonl", [0.9] * 20)
    watch.add_message(MISS)
    assert [alarm.title for alarm in watch.new()] == ["stale server", "clip fraction"]
    assert watch.new() == []
    later = AlarmWatch(tmp_path, config(), every_s=3600.0)
    assert [alarm.title for alarm in later.new()] == ["clip fraction"]
    assert later.new() == [], "too early to look again"
    later.add_message(MISS)
    assert [alarm.title for alarm in later.new()] == ["stale server"], "at once: the run may end with it"


def test_new_tells_of_every_server_that_misses_the_same_version(tmp_path: Path) -> None:
    watch = AlarmWatch(tmp_path, config(), every_s=0.0)
    told = []
    for server in ("a", "b", "b", "a"):
        watch.add_message(ProbeMissed(server=server, version=7, since=6, is_final=True, reason="bytes differ"))
        watch.add_message(CalibrationExceeded(server=server, difference=0.5, limit=0.2))
        told.append([(alarm.title, alarm.about) for alarm in watch.new()])
    assert told == [[("calibration", name), ("stale server", name)] for name in "ab"] + [[], []]


def test_a_long_run_keeps_few_updates_and_finds_the_lost_server(tmp_path: Path) -> None:
    watch = AlarmWatch(tmp_path, config(), every_s=0.0)
    for version in range(1, 2001):
        servers = ("a", "b", "c") if version < 1000 else ("a", "b")
        watch.add_message(WeightUpdateSuccess(version=version, servers=servers))
        assert len(watch._messages) <= 4
    assert [(alarm.title, alarm.about, alarm.step) for alarm in watch.new()] == [("server out of service", "c", 999)]


def test_new_tells_an_alarm_once_whose_first_step_moves(tmp_path: Path) -> None:
    """The servers take a version now and then, far behind the trainer: each look finds another first step."""
    watch = AlarmWatch(tmp_path, config(), every_s=0.0)
    told = []
    for look in range(4):
        points = [{"step": 100 * look + i, "live_version": 10 * look} for i in range(100, 120)]
        path = tmp_path / "metrics" / "finetune.jsonl"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(point) + "\n" for point in points)
        told.append([(alarm.title, alarm.step) for alarm in watch.new()])
    assert told == [[("stalled version", 0)], [], [], []]


def test_progress_lines_show_an_alarm_after_its_step(tmp_path: Path) -> None:
    set_streams_backend("files")
    lines: list[str] = []
    shown = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("alarm"):
            shown.set()

    write(tmp_path / "metrics" / "finetune.jsonl", [0.9] * 20)
    with open_writer(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage) as writer:
        progress = ProgressLines(tmp_path, cfg=config("finetune.max_train_steps=30"), say=say)
        follower = TopicFollower(tmp_path, progress, last_step=30)
        writer.write(MISS)
        writer.write(SamplesProcessed(samples_processed=8, step=20, timestamp=time.time() + 1))
        follower.start()
        assert shown.wait(60)
        follower.stop()
    assert lines[0].startswith("step 20/30")
    assert re.match(says("alarm: stale server", "step 7", "actor_llm_1"), lines[1])
    assert re.match(says("alarm: clip fraction", "step 0", "90%", "lower"), lines[2])
