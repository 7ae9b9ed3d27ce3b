"""The line that says what goes on now: its words, and where it is shown."""

import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.errors import DomainError, told_in_one_line
from pipelinerl.launcher.command_line import refuse
from pipelinerl.launcher.terminal import RunLine, Terminal, describe_run, eta
from pipelinerl.observability.logging import EventFormatter
from pipelinerl.observability.status import StatusRecord, Wait, write_status

NOW = 1000.0


def role(name: str, *, count: int = 1, waits: tuple[Wait, ...] = (), **fields: Any) -> StatusRecord:
    return StatusRecord(
        job=name,
        state="running",
        pid=1,
        hostname="h",
        started=NOW,
        heartbeat=NOW,
        progress_at=NOW,
        progress_count=count,
        waits=waits,
        fields=fields,
    )


def line(*roles: StatusRecord, metrics: dict | None = None, step: int = 0, speed: float | None = None) -> str:
    statuses = {one.job: one for one in roles}
    return describe_run(statuses, metrics or {}, NOW, NOW - 12, step=step, last=160, speed=speed)


def test_start_names_what_loads_and_what_waits() -> None:
    engine = Wait(what="the engine's start", on=None, since=NOW - 5)
    model = Wait(what="the tiny model", on="launcher", since=NOW - 3)
    server, trainer = role("actor_llm_0", count=0, waits=(engine,)), role("finetune_0", count=0, waits=(model,))
    held_up = role("preprocessor_0", count=0, waits=(Wait(what="the next group", on="actor_0", since=NOW),))
    assert line(server, trainer, role("actor_0", count=0), held_up) == (
        "starting, 12 s  actor_0: loads  actor_llm_0: the engine's start 5 s  finetune_0: waits for the tiny model"
    )
    assert line() == "starting, 12 s"


def test_training_says_steps_speed_rest_and_failures_by_reason() -> None:
    failures = {"failures/timeout": 9, "failures/domain": 3, "failures/server": 0}
    assert line(role("finetune_0"), metrics=failures, step=40, speed=3.0) == (
        "training 40/160  3.00 steps/s  40 s to go  12 rollouts failed: timeout 9, domain 3"
    )
    assert line(role("finetune_0"), step=1) == "training 1/160"


def test_run_without_rollouts_speaks_of_conversations() -> None:
    statuses = {"finetune_0": role("finetune_0", waits=(Wait(what="micro-batches", on="preprocessor", since=NOW),))}
    first = describe_run(statuses, {}, NOW, NOW - 12, step=0, last=160, speed=None, has_rollouts=False)
    last = describe_run(statuses, {}, NOW, NOW - 12, step=160, last=160, speed=None, has_rollouts=False)
    assert (first, last) == ("first conversations, 12 s", "ending: the last saves")


def test_evaluation_says_how_far_it_is() -> None:
    assert line(role("actor_0", evaluating="120/512")) == "evaluating 120/512"
    assert line(role("actor_0", evaluating="7/512"), step=160) == "evaluating 7/512"
    assert line(role("actor_0", evaluating=None), step=160) == "ending: the last evaluation and saves"


def test_what_comes_before_the_first_weights_is_named() -> None:
    text = Wait(what="the first text of an inference server", on="actor_llm", since=NOW - 7)
    weights = Wait(what="the first weights", on="finetune_0", since=NOW - 12)
    assert line(role("actor_0", waits=(weights,)), role("finetune_0", waits=(text,))) == (
        "first weights, 12 s  finetune_0: the first text of an inference server 7 s"
    )


def test_first_rollouts_are_counted() -> None:
    assert line(role("actor_0"), metrics={"rollouts": 64}) == "first rollouts, 12 s  64 rollouts"


def test_first_step_is_named_while_the_trainer_computes_it() -> None:
    data = Wait(what="micro-batches of step 1", on="preprocessor_0", since=NOW - 4)
    assert line(role("finetune_0", waits=(data,)), metrics={"rollouts": 64}) == "first rollouts, 12 s  64 rollouts"
    assert line(role("finetune_0"), metrics={"rollouts": 64}) == "first optimizer step, 12 s"


def test_first_answers_are_counted_with_the_longest_and_who_samples_them() -> None:
    metrics = {
        "rollouts": 0,
        "rollouts_ended": 12,
        "rollouts_under_way": 52,
        "longest_under_way": 2100,
        "tokens_generated_per_s": 340.2,
    }
    servers = role("actor_llm_0", requests=30), role("actor_llm_1", requests=22), role("actor_llm_2", requests=0)
    assert line(*servers, metrics=metrics) == (
        "first rollouts, 12 s  first answers: 12 of 64, longest 2,100 tokens  340 tok/s  on actor_llm_0 (30), "
        "actor_llm_1 (22)"
    )
    five = [role(f"actor_llm_{number}", requests=10) for number in range(5)]
    assert line(*five[:4], metrics=metrics).endswith("actor_llm_2 (10), actor_llm_3 (10)")
    assert line(*five, metrics=metrics).endswith("340 tok/s  50 requests on 5 servers")
    assert line(role("actor_0", evaluating="0/64"), metrics=metrics) == "evaluating 0/64  longest 2,100 tokens"


def test_eta_in_the_unit_of_its_size() -> None:
    assert [eta(0, 100, speed) for speed in (1.0, 0.1, 0.01)] == ["100 s", "17 min", "2.8 h"]


def test_run_line_measures_the_steps_it_saw(tmp_path: Path) -> None:
    (tmp_path / "status").mkdir()
    now = [NOW]
    describe = RunLine(tmp_path, 160, clock=lambda: now[0])
    assert describe() == "starting, 0 s"
    shown = []
    for seconds, step in ((1, 1), (3, 5), (35, 21), (45, 31)):
        now[0] = NOW + seconds
        write_status(tmp_path / "status" / "finetune_0.json", role("finetune_0", step=step))
        shown.append(describe())
    assert shown[1] == "training 5/160  2.00 steps/s  78 s to go"
    assert [line.split("  ")[1] for line in shown[2:]] == ["0.50 steps/s", "1.00 steps/s"]  # of 30 seconds


def test_live_line_in_a_pipe_is_said_after_silence_only(capsys) -> None:
    logged: list[str] = []
    terminal, spoken = Terminal(logged.append, repeat_s=0.05), iter(range(10**6))
    with terminal.live(lambda: f"phase {next(spoken)}"):
        deadline = time.monotonic() + 60
        while len(logged) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert logged[:2] == ["phase 0", "phase 1"]
    assert "phase 0\nphase 1\n" in capsys.readouterr().out
    quiet = Terminal(logged.append, repeat_s=3600)
    with quiet.live(lambda: "never"):
        quiet.say("a line")
    assert capsys.readouterr().out.endswith("a line\n")
    assert "never" not in logged


def test_live_line_that_cannot_be_made_ends_nothing(capsys) -> None:
    terminal = Terminal(lambda line: None, repeat_s=0.01)
    with terminal.live(lambda: str(1 / 0)):
        time.sleep(0.05)
    assert capsys.readouterr().out == ""


WITHOUT_READER = """
import os, sys
from rich.console import Console
from pipelinerl.launcher.terminal import Terminal

sys.stdin.readline()
logged = []
terminal = Terminal(logged.append)
with terminal.live(lambda: "never"):
    terminal.show("a table")
    terminal.say("the first line")
    terminal.say("the second line")
Console().print("rich would exit here")
print("and Python would fail at its end")
open(sys.argv[1], "w").write("\\n".join(logged))
"""


@pytest.mark.parametrize("with_errors", [False, True])
def test_voice_whose_reader_left_goes_on_and_logs_that(with_errors: bool, tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_READER, str(tmp_path / "log")],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs if with_errors else subprocess.PIPE,
    )
    os.close(theirs)
    os.close(ours)
    _, errors = process.communicate(b"\n", timeout=60)
    assert (process.returncode, errors) == (0, None if with_errors else b"")
    first, *said = (tmp_path / "log").read_text().splitlines()
    assert first.startswith("standard output cannot be written ([Errno 32] Broken pipe)")
    assert said == ["the first line", "the second line"]


ON_A_TERMINAL = """
import threading
from pipelinerl.launcher.terminal import Terminal

shown = threading.Event()
asked = []

def describe():
    asked.append(1)
    if len(asked) > 3:
        shown.set()
    return "evaluating 120/512"

terminal = Terminal(lambda line: None)
with terminal.live(describe):
    shown.wait(30)
    terminal.say("evaluation of version 0")
print("the end")
"""


def test_live_line_on_a_terminal_is_redrawn_and_leaves_only_what_was_said() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdout=theirs, stderr=theirs, stdin=theirs, env=environment
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            block = os.read(ours, 4096)
        except OSError:  # the other end is closed: Linux says EIO
            break
        if not block:
            break
        output += block
    os.close(ours)
    assert process.wait(30) == 0, output
    text = output.decode()
    assert text.count("evaluating 120/512") >= 2, text
    assert "\x1b[2K" in text.split("evaluating 120/512")[-1], "the last line is erased"
    assert text.index("evaluation of version 0") < text.index("the end")


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b[2J\x1b[31mred", "␛[2J␛[31mred"),
        ("\x1b]0;title\x07", "␛]0;title␇"),
        ("\x9b31m\x85", "\ufffd31m\ufffd"),
        ("overwritten\rshort", "overwritten␍short"),
        ("ab\x08\x7f\x00", "ab␈\ufffd␀"),
        ("\u202egnp.exe\u2066\u200f", "\ufffdgnp.exe\ufffd\ufffd"),
        ("one\u2028two\u2029", "one\ufffdtwo\ufffd"),
        ("half \ud83d", "half \ufffd"),
        ("\t é 漢 🙂 👩\u200d🚀 e\u0301", "\t é 漢 🙂 👩\u200d🚀 e\u0301"),
    ],
)
def test_control_characters_have_no_effect_on_terminal_and_log(
    hostile: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Terminal(lambda _: None).say(hostile)
    refuse(hostile)

    def fail() -> int:
        raise DomainError(hostile)

    told_in_one_line(fail)
    terminal = capsys.readouterr()
    assert (terminal.out, terminal.err) == (f"{shown}\n", f"error: {shown}\n" * 2)
    event = logging.LogRecord("domain", logging.INFO, "f", 1, "%s", (hostile,), None)
    assert EventFormatter("actor_0").format(event).endswith(f"INFO actor_0 domain: {shown}")
