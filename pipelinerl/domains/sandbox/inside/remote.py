"""Runs one program on a provider's machine and prints its outcome: ``python3 remote.py FOLDER SECONDS OUTPUT_BYTES``.

``FOLDER`` holds ``program.py`` and ``stdin.txt``. The first line of the output says that the run begins, the second is
the outcome as JSON. This file is sent there alone: standard library of Python 3.8 or newer.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time

BEGINS = "pipelinerl: the program begins"
ERROR_BYTES = 4096
"""The end of the error output that is returned: a traceback fits."""


def main(folder: str, limit_s: float, output_bytes: int) -> None:
    print(BEGINS, flush=True)
    paths = {name: os.path.join(folder, name) for name in ("program.py", "stdin.txt", "stdout.txt", "stderr.txt")}

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (output_bytes + 1, output_bytes + 1))

    started = time.monotonic()
    with (
        open(paths["stdin.txt"], encoding="utf-8") as stdin,
        open(paths["stdout.txt"], "w", encoding="utf-8") as out,
        open(paths["stderr.txt"], "w", encoding="utf-8") as err,
    ):
        process = subprocess.Popen(
            [sys.executable, paths["program.py"]],
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=folder,
            start_new_session=True,
            preexec_fn=limit_files,  # noqa: PLW1509 (this program has one thread)
        )
        try:
            code, late = process.wait(limit_s), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code, late = process.wait(), True
    seconds = time.monotonic() - started
    texts = []
    for name in ("stdout.txt", "stderr.txt"):
        with open(paths[name], "rb") as stream:
            texts.append(stream.read(output_bytes + 1))
    ended = "time" if late else "output" if len(texts[0]) > output_bytes else "exited" if code >= 0 else "signal"
    stdout, stderr = (text.decode("utf-8", "replace") for text in (texts[0][:output_bytes], texts[1][-ERROR_BYTES:]))
    outcome = {"ended": ended, "exit_code": code, "seconds": seconds, "stdout": stdout, "stderr": stderr}
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
