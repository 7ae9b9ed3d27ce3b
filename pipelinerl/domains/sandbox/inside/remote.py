"""Runs one program on a provider's machine and prints its outcome: ``python3 remote.py FOLDER SECONDS OUTPUT_BYTES``.

``FOLDER`` holds ``program.py``, ``stdin.txt`` and ``token``. The first line of the output says that the run begins. The
outcome is a line of the token, which no program can read, and JSON. This file is sent there alone: standard library of
Python 3.9 or newer.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

BEGINS = "pipelinerl: the program begins"
ERROR_BYTES = 4096
"""The end of the error output that is returned: a traceback fits."""
NOBODY = 65534
PR_SET_DUMPABLE = 4


def main(folder: str, limit_s: float, output_bytes: int) -> None:
    as_root = os.geteuid() == 0
    if as_root:
        os.chmod(folder, 0o777)  # a program may write beside itself
    else:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # else it opens this process's memory and descriptors
    token_path = os.path.join(folder, "token")
    with open(token_path, encoding="utf-8") as stream:
        token = stream.read()
    os.remove(token_path)

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes + 1, output_bytes + 1))
        if as_root:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)

    def start(arguments: "list[str]", stdin: "IO[bytes]", out: "IO[bytes]", err: "IO[bytes]") -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, *arguments],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=folder,
            start_new_session=True,
            preexec_fn=confine,  # noqa: PLW1509 (this program has one thread)
        )

    program = os.path.join(folder, "program.py")
    # The output has no name: a program could put a pipe in its place, which is never read to its end.
    with (
        open(os.path.join(folder, "stdin.txt"), "rb") as stdin,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        if start(["-c", f"open({program!r})"], stdin, out, err).wait():
            print(f"the program's user cannot run {sys.executable}: {os.pread(err.fileno(), ERROR_BYTES, 0)!r}")
            return
        print(BEGINS, flush=True)
        started = time.monotonic()
        process = start([program], stdin, out, err)
        try:
            code, late = process.wait(limit_s), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, late = process.wait(), True
        seconds = time.monotonic() - started
        stdout, stderr = (os.pread(stream.fileno(), output_bytes + 1, 0) for stream in (out, err))
    ended = "time" if late else "output" if len(stdout) > output_bytes else "exited" if code >= 0 else "signal"
    texts = {"stdout": stdout[:output_bytes], "stderr": stderr[-ERROR_BYTES:]}
    decoded = {name: text.decode("utf-8", "replace") for name, text in texts.items()}
    print(f"\n{token} {json.dumps({'ended': ended, 'exit_code': code, 'seconds': seconds, **decoded})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
