"""The preprocessor as a process on file streams: killed at seeded moments, then compared with an undisturbed run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.synthetic_groups import make_groups
from pipelinerl.config.load import compose
from pipelinerl.records import ActorRecord, MicroBatch, PreprocessorProgress, topics
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from pipelinerl.world import Job, WorldMap

GROUPS, ATTEMPTS, BATCH = 40, 8, 24
DEADLINE_S = 200.0


def write_run(run_dir: Path) -> None:
    """A run folder with one preprocessor, two trainer ranks, and all groups published."""
    (run_dir / "model").mkdir(parents=True)
    (run_dir / "model" / "config.json").write_text('{"vocab_size": 1000}')
    cfg = compose(
        "base",
        [
            f"output_dir={run_dir}",
            f"model_path={run_dir / 'model'}",
            "dataset_loader=a.b",
            "actor.rollout_policy=a.b",
            "wandb.mode=disabled",
            f"attempts={ATTEMPTS}",
            f"finetune.gradient_accumulation_passes={BATCH}",
            "preprocess.max_ready_steps=1000",
            "max_lag_steps=null",
        ],
    )
    (run_dir / "conf").mkdir()
    OmegaConf.save(cfg, run_dir / "conf" / "config.yaml", resolve=True)
    jobs = (Job(name="preprocessor_0", kind="preprocessor"), Job(name="finetune_0", kind="finetune", num_ranks=2))
    WorldMap(accelerator="cpu", nodes=(), jobs=jobs, master_port=0, weight_port=0, weight_ports=0).save(run_dir)
    with open_writer(SingleStreamSpec(run_dir, topics.ACTOR), ActorRecord) as writer:
        for group in make_groups(3, GROUPS, attempts=ATTEMPTS, vocab_size=1000, versions=1):
            writer.write(group)


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pipelinerl.preprocess", "--run-dir", str(run_dir), "--job", "preprocessor_0"]
    with open(run_dir / "log.txt", "ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def wait_until(condition: Callable[[], bool], run_dir: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, (run_dir / "log.txt").read_text()
        time.sleep(0.01)


def read_topic(run_dir: Path, topic: str, record_type: Any, partition: int = 0) -> list[Any]:
    with open_reader(SingleStreamSpec(run_dir, topic, partition=partition), record_type, name=None, start=0) as reader:
        return [record for _, record in reader.read_all()]


def steps_done(run_dir: Path) -> int:
    records = read_topic(run_dir, topics.PREPROCESSOR, PreprocessorProgress)
    return records[-1].step if records else 0


def end(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=DEADLINE_S) == 0, (run_dir / "log.txt").read_text()


def output(run_dir: Path) -> list[list[tuple]]:
    return [
        [
            (mb.step, mb.index, mb.sequence_ids, mb.token_ids.tobytes(), mb.advantages.tobytes(), mb.logprobs.tobytes())
            for mb in read_topic(run_dir, topics.TRAINING_DATA, MicroBatch, partition)
        ]
        for partition in range(2)
    ]


@pytest.fixture
def whole_steps() -> int:
    return GROUPS * ATTEMPTS // BATCH


@pytest.mark.slow
def test_killed_process_continues_exactly_after_its_last_published_output(tmp_path: Path, whole_steps: int):
    set_streams_backend("files")
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    for run_dir in (undisturbed, killed):
        write_run(run_dir)
    process = start(undisturbed)
    wait_until(lambda: steps_done(undisturbed) == whole_steps, undisturbed)
    end(process, undisturbed)
    rng = random.Random(0)
    for _ in range(4):
        process = start(killed)
        goal = steps_done(killed) + rng.randrange(0, 4)
        wait_until(lambda goal=goal: steps_done(killed) >= min(goal, whole_steps), killed)
        time.sleep(rng.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    log = killed / "log.txt"
    starts = log.read_text().count("ready step")
    process = start(killed)
    wait_until(lambda: steps_done(killed) == whole_steps and log.read_text().count("ready step") > starts, killed)
    end(process, killed)
    assert output(killed) == output(undisturbed)
    packed = [i for r in read_topic(killed, topics.PREPROCESSOR, PreprocessorProgress) for i in r.packed_sample_ids]
    assert (
        packed
        == [f"0-{position}/{attempt}" for position in range(GROUPS) for attempt in range(ATTEMPTS)][
            : whole_steps * BATCH
        ]
    )


def test_preprocessor_loads_nothing_heavy():
    heavy = ("torch", "vllm", "deepspeed", "transformers")
    code = f"import sys, pipelinerl.preprocess.loop; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
