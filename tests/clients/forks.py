"""Starts many processes of one client without importing the client in each: they are forked from one that has.

``forks.py serve SOCKET MODULE …`` imports the modules, says so on its output, and forks a process for each that asks.
``forks.py run SOCKET [-m MODULE | FILE] ARGUMENT …`` is for its caller the same as ``python [-m MODULE | FILE] …``:
the forked process has its environment variables, folder, input and outputs, and gives it its exit code. It does not end
with its caller, but with the process group of the server.

No thread may run when the process forks.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
from pathlib import Path

STREAMS = (0, 1, 2)


def serve(path: str, modules: list[str]) -> list[str]:
    """Returns in a forked process alone, with the command that it is to run."""
    for module in modules:
        importlib.import_module(module)
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps those that wait for a program
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    while True:
        caller, _ = listening.accept()
        if os.fork() == 0:
            break
        caller.close()
    listening.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if program := os.fork():
        _, status = os.waitpid(program, 0)
        caller.sendall(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
        os._exit(0)
    return take_place_of(caller)


def take_place_of(caller: socket.socket) -> list[str]:
    """Gives this process its caller's streams, variables and folder, and returns the caller's command."""
    _, streams, _, _ = socket.recv_fds(caller, 1, len(STREAMS))
    asked = json.loads(caller.makefile().readline())
    caller.close()
    for ours, theirs in zip(STREAMS, streams, strict=True):
        os.dup2(theirs, ours)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["folder"])
    return asked["command"]


def run_program(command: list[str]) -> None:
    """Runs ``[-m MODULE | FILE] ARGUMENT …`` as Python's command line does."""
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def ask(path: str, command: list[str]) -> int:
    """Has the server at ``path`` run a command in this process's place, and returns its exit code."""
    asked = {"command": command, "env": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b"."], list(STREAMS))
        server.sendall(json.dumps(asked).encode() + b"\n")
        return next(iter(server.recv(1)), 1)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        run_program(serve(sys.argv[2], sys.argv[3:]))
    else:
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
