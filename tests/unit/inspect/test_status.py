"""`python -m pipelinerl.status`: one screen from a run folder made by hand."""

import fcntl
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.inspect import status as command
from pipelinerl.inspect.report import RunRecords
from pipelinerl.observability.status import RoleStatus, StatusRecord, Wait, read_statuses, write_status
from pipelinerl.records import EvaluationDone, SamplesProcessed, TrainingDone, WeightUpdateSuccess
from pipelinerl.records.messages import TrainerMessage
from pipelinerl.streams import SingleStreamSpec, open_reader, open_writer, set_streams_backend
from tests.run_folder import write_config
from tests.says import says

NOW = 10_000.0


def record(job: str, **changes: object) -> StatusRecord:
    values: dict = {
        "job": job,
        "state": "running",
        "pid": 1,
        "hostname": "h",
        "started": NOW - 500,
        "heartbeat": NOW - 1,
        "progress_at": NOW - 3,
        "progress_count": 5,
        "waits": (),
        "fields": {},
    }
    return StatusRecord(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "working"),
        ({"waits": (Wait(what="w", on=None, since=NOW),)}, "waiting"),
        ({"progress_count": 0}, "starting"),
        ({"heartbeat": NOW - 60}, "silent for 60 s"),
        ({"state": "done", "heartbeat": NOW - 900}, "done"),
    ],
)
def test_describe_state_in_one_word(changes: dict, state: str) -> None:
    assert command.describe_state(record("actor_0", **changes), NOW) == state


def test_role_rows_and_chains_name_who_waits_for_whom() -> None:
    statuses = {
        "actor_0": record("actor_0", waits=(Wait(what="version 4", on="finetune_0", since=NOW - 150),)),
        "finetune_0": record("finetune_0", waits=(Wait(what="step 4", on="preprocessor", since=NOW - 60),)),
        "preprocessor_0": record("preprocessor_0", fields={"step": 4}),
    }
    rows = command.role_rows(statuses, NOW)
    assert rows[0] == ("actor_0", "waiting", "3 s ago", "version 4 on finetune_0, 2 min", "")
    assert rows[2] == ("preprocessor_0", "working", "3 s ago", "", "step=4")
    assert command.chains(statuses) == ["actor_0 → finetune_0 → preprocessor_0"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (125, "2 min"), (7300, "2.0 h")])
def test_ago_keeps_it_short(seconds: float, text: str) -> None:
    assert command.ago(seconds) == text


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    write_config(tmp_path)
    set_streams_backend("files")
    with open_reader(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage, name="actor_0"):
        with open_writer(SingleStreamSpec(tmp_path, "trainer"), TrainerMessage) as writer:
            writer.write(WeightUpdateSuccess(version=3, servers=("actor_llm_0",)))
            writer.write(SamplesProcessed(samples_processed=128, step=3, metrics={"lag_mean": 1.5, "lag_max": 3.0}))
            writer.write(TrainingDone(step=3))
    with open_writer(SingleStreamSpec(tmp_path, "evaluation"), EvaluationDone) as writer:
        writer.write(EvaluationDone(version=3, success=0.5, reward=0.25, num_rollouts=8, metrics={}))
    (tmp_path / "hangs" / "20260101-000000-actor_0").mkdir(parents=True)
    return tmp_path


def test_screen_shows_roles_versions_queues_and_hangs(run_folder: Path) -> None:
    (run_folder / "status").mkdir()
    write_status(run_folder / "status" / "actor_0.json", record("actor_0", heartbeat=time.time()))
    text = "\n".join(command.screen(run_folder))
    for line in (
        "actor_0",
        "trained   step 3, 128 rollouts, lag 1.5 (max 3)",
        "weights   version 3 on actor_llm_0",
        "evaluated version 3: success 0.500, reward 0.25",
        "training is done",
        "trainer/0/0",
        "actor_0 3 behind",
        "hang report: ",
    ):
        assert line in text, text


def test_screen_has_the_table_of_drops(run_folder: Path) -> None:
    (run_folder / "metrics").mkdir()
    (run_folder / "metrics" / "preprocessor.jsonl").write_text('{"dropped/lag": 7}\n', encoding="utf-8")
    (row,) = [line.split() for line in command.screen(run_folder) if line.startswith("lag ")]
    assert row[:2] == ["lag", "7"]


def test_screen_shows_control_characters_of_a_domain_as_pictures(run_folder: Path) -> None:
    (run_folder / "status").mkdir()
    write_status(run_folder / "status" / "actor_0.json", record("actor_0", fields={"evaluating": "\x1b[2J\rdata"}))
    screen = "\n".join(command.screen(run_folder))
    assert "evaluating=␛[2J␍data" in screen


def test_progress_of_a_run_that_imitates_has_its_loss() -> None:
    metrics = {"sft_loss": 0.25, "sequences": 0.0, "lag_mean": 0.0}
    step = SamplesProcessed(samples_processed=128, step=3, metrics=metrics)
    assert command.progress_lines(RunRecords(trainer=[step])) == [
        "trained   step 3, 128 conversations, loss 0.250 nats per token"
    ]


def test_screen_of_a_run_that_is_over_says_how_it_ended(run_folder: Path) -> None:
    (run_folder / "status").mkdir()
    path = run_folder / "status" / "actor_0.json"
    write_status(path, record("actor_0", heartbeat=time.time(), waits=(Wait(what="w", on=None, since=NOW),)))
    first, _, row, *_ = command.screen(run_folder)
    assert re.search(says("stopped", "step 3 of 1000", "resumes"), first)
    assert row.split()[:2] == ["actor_0", "stopped"]
    assert "w," not in row
    write_status(path, record("actor_0", state="failed"))
    assert ": failed (actor_0) at step 3 of 1000" in command.screen(run_folder)[0]
    with open(run_folder / "launcher.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert command.screen(run_folder)[0].endswith(": running, step 3 of 1000")
    (run_folder / "summary.json").write_text('{"optimizer_steps": 1000}')
    assert command.screen(run_folder)[0].endswith(": finished, 1000 steps")


def test_watch_in_a_pipe_ends_with_the_run(run_folder: Path) -> None:
    argv = [sys.executable, "-m", "pipelinerl.status", str(run_folder), "--watch"]
    with open(run_folder / "launcher.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert ": running, step 3" in process.stdout.readline()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert ": stopped at step 3" in output


def test_stacks_of_live_roles_are_printed_and_strangers_are_not_signalled(run_folder: Path) -> None:
    code = (
        "import sys, time\n"
        "from pipelinerl.observability.status import RoleStatus\n"
        "status = RoleStatus(sys.argv[1], 'actor_0')\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PIPELINERL_ROLE": "token/actor_0"}
    role = subprocess.Popen([sys.executable, "-c", code, str(run_folder)], stdout=subprocess.PIPE, env=environment)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert role.stdout is not None
        role.stdout.readline()
        (run_folder / "actor_0/stacks.txt").write_text("é" * 400 + "\n")  # of an earlier time
        write_status(
            run_folder / "status" / "verifier_0.json",
            record("verifier_0", pid=stranger.pid, hostname=os.uname().nodename),
        )
        lines = command.dump_stacks(run_folder, read_statuses(run_folder))
        assert [line for line in lines if line.startswith("──")] == [f"── actor_0 ({run_folder}/actor_0/stacks.txt)"]
        assert lines[1].startswith(("Thread 0x", "Current thread 0x"))
        assert '"<string>", line ' in "\n".join(lines)
        assert stranger.poll() is None
    finally:
        for process in (role, stranger):
            process.kill()
            process.wait()
        role.stdout.close()


def test_main_refuses_what_is_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says(tmp_path, "run folder")):
        command.main([str(tmp_path)])


def test_main_works_after_the_run(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RoleStatus(run_folder, "actor_0").close()
    assert command.main([str(run_folder), "--stacks"]) == 0
    assert "done" in capsys.readouterr().out
