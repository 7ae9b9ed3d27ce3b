"""Logs of roles: bounded, and read across the cut."""

import os
import subprocess
import sys
from pathlib import Path

from pipelinerl.launcher.logs import cut_logs, last_lines
from pipelinerl.launcher.run_dir import last_error_line


def test_log_beyond_its_bound_is_begun_anew_and_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    script = "import sys\nprint('x' * 3000, flush=True)\nsys.stdin.read(1)\nprint('later', flush=True)"
    writer = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=descriptor)
    os.close(descriptor)
    while path.stat().st_size < 3000:
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
