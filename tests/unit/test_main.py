"""The command `pipelinerl` itself."""

import subprocess
import sys


def test_help_whose_reader_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pipelinerl", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
