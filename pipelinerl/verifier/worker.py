"""A worker process judges one check at a time, within limits, until its channel closes.

It reads checks and writes verdicts on a socket. Each frame is a 4-byte length and JSON. A profiling timer limits CPU
time by interrupting Python code. The pool kills workers whose code never returns to Python. The kernel limits memory:
an allocation beyond the limit raises MemoryError.
"""

import gc
import os
import resource
import signal
import socket
import struct
from types import FrameType

import msgspec

from pipelinerl.host.process import die_with_parent
from pipelinerl.records.verdicts import Check, Verdict, error, unparsable
from pipelinerl.verifier.judges import JUDGES, warm_up

HEADER = struct.Struct("!I")


class TimeLimitReached(BaseException):
    """The CPU time is used up. Not an ``Exception``, so that judges' own handlers do not catch it."""


def serve(channel: socket.socket, timeout_s: float, memory_mb: int) -> None:
    """Answers checks until the pool closes the channel."""
    limit_process(memory_mb)
    served = 0
    while (frame := read_frame(channel)) is not None:
        verdict = judge_limited(msgspec.json.decode(frame, type=Check), timeout_s)
        if verdict is None:
            # Earlier checks may have used up the memory. Close the channel, so that a new worker repeats the check.
            if served:
                return
            verdict = unparsable("memory limit")
        served += 1
        payload = msgspec.json.encode(verdict)
        channel.sendall(HEADER.pack(len(payload)) + payload)


def limit_process(memory_mb: int) -> None:
    """Limits memory, forbids core dumps and file writes, and ends the process together with its parent."""
    die_with_parent(signal.SIGKILL)
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, interrupt)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def interrupt(signum: int, frame: FrameType | None) -> None:
    raise TimeLimitReached


def judge_limited(check: Check, timeout_s: float) -> Verdict | None:
    """Runs the judge with a limit on CPU time. Returns None if memory ran out."""
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, timeout_s)
            return JUDGES[check.kind](check.prediction, check.gold, check.options)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TimeLimitReached:
        return unparsable("time limit")
    except MemoryError:
        return None
    except RecursionError:
        return unparsable("nested too deeply")
    except Exception as failure:  # the boundary of the judge's code: its failure is an error, never a verdict
        return error(f"{check.kind}: {type(failure).__name__}: {failure}"[:500])


def read_frame(channel: socket.socket) -> bytes | None:
    header = read_exactly(channel, HEADER.size)
    return None if header is None else read_exactly(channel, HEADER.unpack(header)[0])


def read_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        piece = channel.recv(count - len(parts))
        if not piece:
            return None
        parts += piece
    return bytes(parts)


def main(control: socket.socket, timeout_s: float, memory_mb: int) -> None:
    """Runs the forkserver: imports the judges once, then forks one worker per request (see ``pool``)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up()
    gc.collect()
    gc.freeze()  # keeps the workers' garbage collectors from copying these shared pages
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            return
        process = os.fork()
        if process == 0:
            control.close()
            with socket.socket(fileno=descriptors[0]) as channel:
                serve(channel, timeout_s, memory_mb)
            os._exit(0)
        os.close(descriptors[0])
        control.send(str(process).encode())


if __name__ == "__main__":
    import sys

    die_with_parent(signal.SIGKILL)
    main(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]), int(sys.argv[3]))
