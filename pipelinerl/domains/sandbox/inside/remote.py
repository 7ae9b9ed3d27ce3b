"""Runs one program on a provider's machine and prints its outcome: ``python3 remote.py FOLDER SECONDS OUTPUT_BYTES``.

``FOLDER`` holds ``program.py``, or ``task.json`` (a command of a workspace), and ``stdin.txt`` and ``token``. The first
line of the output says that the run begins. The outcome is a line of the token, which no program can read, and JSON
with the output in base64. This file is sent there alone: standard library of Python 3.9 or newer.
"""

import base64
import contextlib
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
NO_SUCH_PROGRAM = 127
PR_SET_DUMPABLE = 4


def read_task(folder: str, output_bytes: int) -> "dict":
    """Returns what to run. A program runs in ``folder``, a command in its workspace's."""
    path = os.path.join(folder, "task.json")
    if os.path.exists(path):
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    command = [sys.executable, os.path.join(folder, "program.py")]
    limits = {resource.RLIMIT_FSIZE: output_bytes + 1}
    return {"command": command, "folder": folder, "uid": NOBODY, "environment": None, "limits": limits}


def end_processes(uid: int) -> None:
    """Kills all processes of a user."""
    status = 1
    while status:  # they may kill the child first
        child = os.fork()  # no program is started: the user may have as many processes as it is allowed
        if child == 0:
            try:
                os.setuid(uid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        status = os.waitpid(child, 0)[1]


def main(folder: str, limit_s: float, output_bytes: int) -> None:
    as_root = os.geteuid() == 0
    task = read_task(folder, output_bytes)
    is_workspace = task["folder"] != folder
    if is_workspace:
        if not as_root:
            print("a workspace's commands need a user of their own, so this machine's user must be root")
            return
        os.makedirs(task["folder"], exist_ok=True)
        os.chown(task["folder"], task["uid"], task["uid"])
    elif as_root:
        os.chmod(folder, 0o777)  # a program may write beside itself
    else:
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # else it opens this process's memory and descriptors
    token_path = os.path.join(folder, "token")
    with open(token_path, encoding="utf-8") as stream:
        token = stream.read()
    os.remove(token_path)

    def confine() -> None:
        for limit, value in task["limits"].items():
            resource.setrlimit(int(limit), (value, value + 1))  # CPU time: first SIGXCPU, then SIGKILL
        if as_root:
            os.setgroups([])
            os.setgid(task["uid"])
            os.setuid(task["uid"])

    def start(command: "list[str]", stdin: "IO[bytes]", out: "IO[bytes]", err: "IO[bytes]") -> subprocess.Popen:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=out,
            stderr=err,
            cwd=task["folder"],
            env=task["environment"],
            start_new_session=True,
            preexec_fn=confine,  # noqa: PLW1509 (this program has one thread)
        )

    # The output has no name: a program could put a pipe in its place, which is never read to its end.
    with (
        open(os.path.join(folder, "stdin.txt"), "rb") as stdin,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        # -I -S: it runs nothing of a workspace's home, where an earlier command may have left a site's modules
        if start([sys.executable, "-I", "-S", "-c", f"open({(folder + '/stdin.txt')!r})"], stdin, out, err).wait():
            print(f"the program's user cannot run {sys.executable}: {os.pread(err.fileno(), ERROR_BYTES, 0)!r}")
            return
        print(BEGINS, flush=True)
        started = time.monotonic()
        code, late = NO_SUCH_PROGRAM, False
        try:
            process = start(task["command"], stdin, out, err)
            try:
                code = process.wait(limit_s)
                late = code == -signal.SIGXCPU
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code, late = process.wait(), True
        except (OSError, TypeError, ValueError) as error:  # a NUL in an argument is a ValueError
            if isinstance(error, OSError) and error.filename != task["command"][0]:
                raise  # the machine's, as a fork that fails
            err.write(f"{task['command'][0]}: {error.args[-1]}\n".encode(errors="replace"))
            err.flush()
        seconds = time.monotonic() - started
        if is_workspace:
            end_processes(task["uid"])
        stdout, stderr = (os.pread(stream.fileno(), output_bytes + 1, 0) for stream in (out, err))
    ended = "time" if late else "output" if len(stdout) > output_bytes else "exited" if code >= 0 else "signal"
    texts = {"stdout": stdout[:output_bytes], "stderr": stderr[-ERROR_BYTES:]}
    encoded = {name: base64.b64encode(text).decode() for name, text in texts.items()}
    print(f"\n{token} {json.dumps({'ended': ended, 'exit_code': code, 'seconds': seconds, **encoded})}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
