"""The terminal shows what happens now, not what an earlier launch showed already."""

import threading
import time
from pathlib import Path

from pipelinerl.launcher.following import TopicFollower
from pipelinerl.launcher.terminal import ProgressLines
from pipelinerl.records import SamplesProcessed, TrainerMessage, TrainingResumed
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.evidence import config


def step(number: int, timestamp: float) -> SamplesProcessed:
    return SamplesProcessed(samples_processed=number, step=number, timestamp=timestamp)


def test_resumed_run_shows_no_old_lines_and_repeated_steps_once(tmp_path: Path) -> None:
    set_streams_backend("files")
    lines: list[str] = []
    shown = threading.Event()

    def say(line: str) -> None:
        lines.append(line)
        if line.startswith("step 4/9"):
            shown.set()

    with open_writer(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage) as writer:
        for number in (1, 2, 3):
            writer.write(step(number, time.time() - 100))
        progress = ProgressLines(tmp_path, cfg=config("finetune.max_train_steps=9"), say=say, every_s=0)
        follower = TopicFollower(tmp_path, progress, last_step=9)
        now = time.time() + 1
        writer.write(TrainingResumed(step=2, repeated=1, timestamp=now))
        writer.write(step(3, now))
        writer.write(step(3, now))
        writer.write(step(4, now))
        follower.start()
        assert shown.wait(60)
        follower.stop()
    assert lines[0] == "resuming from step 2 (1 repeated)"
    assert [line.split()[1] for line in lines[1:]] == ["3/9", "4/9"]


def test_fast_steps_are_said_first_and_last_and_noted_between(tmp_path: Path) -> None:
    set_streams_backend("files")
    said: list[str] = []
    noted: list[str] = []
    finished = threading.Event()

    def say(line: str) -> None:
        said.append(line.split()[1])
        if line.startswith("step 5/5"):
            finished.set()

    with open_writer(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage) as writer:
        progress = ProgressLines(
            tmp_path,
            cfg=config("finetune.max_train_steps=5"),
            say=say,
            note=lambda line: noted.append(line.split()[1]),
            every_s=3600,
        )
        follower = TopicFollower(tmp_path, progress, last_step=5)
        for number in range(1, 6):
            writer.write(step(number, time.time() + 1))
        follower.start()
        assert finished.wait(60)
        follower.stop()
    assert said == ["1/5", "5/5"]
    assert noted == ["2/5", "3/5", "4/5"]
