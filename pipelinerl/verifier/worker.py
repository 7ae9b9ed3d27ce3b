"""A worker process: judges one check at a time, within limits, until its channel closes.

Consumes checks and emits verdicts on a socket, each frame a 4-byte length and JSON. CPU time is limited by a profiling
timer that interrupts Python code; code that never returns to Python is killed by the pool. Memory is limited by the
kernel: an allocation beyond it raises MemoryError.
"""

import gc
import os
import resource
import signal
import socket
import struct
from types import FrameType

import msgspec

from pipelinerl.process import die_with_parent
from pipelinerl.records.verdicts import Check, Verdict, error, unparsable
from pipelinerl.verifier.judges import JUDGES, warm_up

HEADER = struct.Struct("!I")


class TimeLimitReached(BaseException):
    """Not an ``Exception``: judges' own handlers must not swallow it."""


def serve(channel: socket.socket, timeout_s: float, memory_mb: int) -> None:
    """Answers checks until the other side closes the channel."""
    limit_process(memory_mb)
    served = 0
    while (frame := read_frame(channel)) is not None:
        verdict = judge_limited(msgspec.json.decode(frame, type=Check), timeout_s)
        if verdict is None:
            # What earlier checks left behind may have used up the memory: only a fresh worker's word counts.
            if served:
                return
            verdict = unparsable("memory limit")
        served += 1
        payload = msgspec.json.encode(verdict)
        channel.sendall(HEADER.pack(len(payload)) + payload)


def limit_process(memory_mb: int) -> None:
    """Memory limit, no core dumps, no new files, death with the parent."""
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
    """The verdict, or None when memory ran out."""
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
    """The forkserver: judges imported once, then one fork per request for a worker (see ``pool``)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warm_up()
    gc.collect()
    gc.freeze()  # workers share these pages: their collector must not touch them
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
