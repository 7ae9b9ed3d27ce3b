"""Logs of roles: bounded, and read across the cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.launcher.logs import cut_logs, last_error_line, last_lines


def test_log_beyond_its_bound_is_begun_anew_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    script = "import sys\nprint('x' * 3000, flush=True)\nsys.stdin.read(1)\nprint('later', flush=True)"
    writer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=descriptor)
    os.close(descriptor)
    while path.stat().st_size < 3001:
        assert writer.poll() is None
    cut_logs([path, tmp_path / "missing.txt"], max_bytes=5000)
    assert path.stat().st_size == 3001
    cut_logs([path], max_bytes=2000)
    assert path.stat().st_size == 0
    writer.communicate(b"y", timeout=60)
    assert path.read_text() == "later\n"
    assert (tmp_path / "log.1.txt").read_text() == "x" * 3000 + "\n"


def test_reason_of_a_role_is_found_across_the_cut(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    (tmp_path / "log.1.txt").write_text("a\n2026 ERROR actor_0 actor: no space\n")
    path.write_text("bye\n")
    assert last_lines(path, 1000) == ["a", "2026 ERROR actor_0 actor: no space", "bye"]
    assert last_lines(path, 4) == ["bye"]
    assert last_error_line(path) == "2026 ERROR actor_0 actor: no space"


def test_error_of_an_earlier_process_is_not_the_reason_of_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text("2026 ERROR actor_0 actor: of the launch before\n")
    began = path.stat().st_size
    assert "before" not in last_error_line(path, since=began)
    with path.open("a") as log:
        log.write("2026 INFO actor_0 actor: a note\n")
    assert last_error_line(path, since=began) == "no error in its log"
    path.write_text("2026 ERROR actor_0 actor: no space\n")  # it was cut, and is shorter now
    assert last_error_line(path, since=began) == "2026 ERROR actor_0 actor: no space"


def test_last_error_line_prefers_the_roles_own_last_word(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(
        "2026-01-01 00:00:00.000 INFO finetune_0 loop: step\n"
        "2026-01-01 00:00:01.000 ERROR finetune_0 role: event=role_failed reason=CheckpointError: disk full\n"
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n=====\n"
    )
    assert last_error_line(log) == "CheckpointError: disk full"
    log.write_text("Traceback\nValueError: bad\nprocess ended\n")
    assert last_error_line(log) == "ValueError: bad"
    log.write_text("Killed\n")
    assert last_error_line(log) == "Killed"
    assert last_error_line(tmp_path / "nothing") == "its log is empty"


ENGINE_FAILED = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("above", "found"),
    [
        (
            "(Worker_TP0 pid=7) ERROR 11-28 11:53:37 [multiproc_executor.py:9] WorkerProc failed to start.\n"
            "(Worker_TP0 pid=7) ERROR 11-28 11:53:37 [multiproc_executor.py:9] Traceback (most recent call last):\n"
            "(EngineCore pid=5) ERROR 11-28 11:53:37 [core.py:1510] Traceback (most recent call last):\n"
            '(Worker_TP0 pid=7) ERROR 11-28 11:53:37 [multiproc_executor.py:9]   File "weights.py", line 1, in load\n'
            "(Worker_TP0 pid=7) ERROR 11-28 11:53:37 [multiproc_executor.py:9] OSError: no weights in /model\n"
            "(EngineCore pid=5) ERROR 11-28 11:53:37 [core.py:1510] Exception: WorkerProc initialization failed\n"
            'Process EngineCore:\nTraceback (most recent call last):\n  File "x"\nException: WorkerProc failed\n',
            "OSError: no weights in /model",
        ),
        (
            'Exception in callback\nTraceback (most recent call last):\n  File "x"\nConnectionError: gone\n'
            'Process EngineCore:\nTraceback (most recent call last):\n  File "x"\nImportError: no module\n',
            "ImportError: no module",
        ),
        ("(EngineCore pid=5) INFO 11-28 11:53:37 [core.py:1] loads\n", ENGINE_FAILED),
    ],
)
def test_last_error_of_a_server_is_the_first_of_its_engine(tmp_path: Path, above: str, found: str) -> None:
    log = tmp_path / "log.txt"
    own = "2026-11-28 11:53:37.419 ERROR actor_llm_0 membership.role: event="
    raised = f"unexpected_error\n    Traceback (most recent call last):\n    {ENGINE_FAILED}\n"
    log.write_text(f"{above}{own}{raised}{own}role_failed reason={ENGINE_FAILED}\n")
    assert last_error_line(log) == found


NOTES = (
    "2026-01-01 00:00:02.000 WARNING actor_0 loop: event=rollout_failed detail=TransportError: error: gone\n"
    "    Traceback (most recent call last):\n"
    "    TransportError: gone\n"
    "(EngineCore pid=7) WARNING 01-01 00:00:02 [core.py:1] ValueError: fell back\n"
    "[W1123 21:17:23.9 socket.cpp:1] socket error: 111\n"
    "2026-01-01 00:00:03.000 INFO actor_0 loop: event=progress note=no ERROR here\n"
)


def test_last_error_line_quotes_no_warning_and_no_note(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(NOTES)
    assert last_error_line(log) == "no error in its log"


@pytest.mark.parametrize(
    "error",
    [
        "2026-01-01 00:00:01.000 ERROR actor_0 actor: no space",
        "2026-01-01 00:00:01.000 CRITICAL actor_0 actor: no space",
        "(EngineCore pid=7) ERROR 01-01 00:00:01 [core.py:1] out of memory",
        "torch.OutOfMemoryError: 2 GiB",
        "[E1123 21:17:23.9 socket.cpp:1] no route",
    ],
)
def test_last_error_line_finds_the_error_before_warnings(tmp_path: Path, error: str) -> None:
    log = tmp_path / "log.txt"
    log.write_text(f"{error}\n{NOTES}")
    assert last_error_line(log) == error
    log.write_text(f"{NOTES}{error}\nTerminated\n")
    assert last_error_line(log) == error
