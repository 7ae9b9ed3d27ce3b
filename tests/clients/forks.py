"""Starts many processes of one client without importing the client in each: they are forked from one that has.

``forks.py serve SOCKET MODULE …`` imports the modules, says so on its output, and forks a process for each that asks.
``forks.py run SOCKET [-m MODULE | FILE] ARGUMENT …`` is for its caller the same as ``python [-m MODULE | FILE] …``:
the forked process has its environment variables, folder, input and outputs, and gives it its exit code.

No thread may run when the process forks. Files and modules run by it find packages of the server's interpreter.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

STREAMS = (0, 1, 2)


def serve(path: str, modules: list[str]) -> None:
    """Ends with its process only."""
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forked ones
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)
        while True:
            caller, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                be_program(caller)
            caller.close()


def be_program(caller: socket.socket) -> None:
    """Runs what the caller asks for, and ends this process."""
    asked, streams, _, _ = socket.recv_fds(caller, 1, len(STREAMS))
    for ours, theirs in zip(STREAMS, streams, strict=True):
        os.dup2(theirs, ours)
        os.close(theirs)
    asked = json.loads(caller.makefile().readline())
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    code = 1
    try:
        code = run_program(asked["command"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    caller.sendall(bytes([code]))
    os._exit(code)


def run_program(command: list[str]) -> int:
    """Runs ``[-m MODULE | FILE] ARGUMENT …`` as Python's command line does, and returns the exit code."""
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = str(Path(command[0]).parent)
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        return int(bool(end.code))
    return 0


def run(path: str, command: list[str]) -> int:
    asked = {"command": command, "env": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"."], list(STREAMS))
        server.sendall(json.dumps(asked).encode() + b"\n")
        return next(iter(server.recv(1)), 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(run(sys.argv[2], sys.argv[3:]))
