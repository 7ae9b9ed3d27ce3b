"""A worker process judges one check at a time, within limits, until its channel closes.

On the channel, checks with their limits come in, and verdicts go out. A check that used up its CPU time gets an empty
reply: a timer interrupts Python code, and the pool kills a worker whose code does not return to Python. An allocation
beyond the limit of memory raises ``MemoryError``.
"""

import gc
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import msgspec

from pipelinerl.domains.verifier.judges import Judge, judges_of, warm_up
from pipelinerl.records.verdicts import Check, Verdict, error, unparsable
from pipelinerl.world.process import die_with_parent

HEADER = struct.Struct("!I")
REQUEST = struct.Struct("!Id")
"""Length of the check in bytes, and its CPU seconds."""
SHORTEST_TIMER_S = 1e-4
"""A timer of 0 would not fire."""


class TimeLimitReached(BaseException):
    """The CPU time is used up. Not an ``Exception``, so that judges' own handlers do not catch it."""


def serve(channel: socket.socket, memory_mb: int, judges: Mapping[str, Judge]) -> None:
    """Answers checks until the pool closes the channel."""
    limit_process(memory_mb)
    served = 0
    while (frame := read_frame(channel)) is not None:
        payload, limit_s = frame
        reply = b""
        try:
            verdict = judge_limited(judges, msgspec.json.decode(payload, type=Check), limit_s)
            reply = msgspec.json.encode(verdict)
        except TimeLimitReached:
            pass
        except MemoryError:
            # Earlier checks may have used up the memory. Close the channel, so that a new worker repeats the check.
            if served:
                return
            reply = msgspec.json.encode(unparsable("memory limit"))
        served += 1
        channel.sendall(HEADER.pack(len(reply)) + reply)


def limit_process(memory_mb: int) -> None:
    """Limits memory, forbids core dumps and file writes, and ends the process together with its parent."""
    die_with_parent(signal.SIGKILL)
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def judge_limited(judges: Mapping[str, Judge], check: Check, limit_s: float) -> Verdict:
    """Runs the judge. Raises ``TimeLimitReached`` after ``limit_s`` of CPU time, ``MemoryError`` if memory runs out."""
    end_s = time.process_time() + limit_s
    ended = False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        left_s = end_s - time.process_time()
        if ended:
            return
        if left_s <= 0:
            raise TimeLimitReached
        signal.setitimer(signal.ITIMER_REAL, max(left_s, SHORTEST_TIMER_S))

    # A timer of wall time that asks for the CPU time: the kernel looks at timers of CPU time at its ticks only.
    signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            return judges[check.kind](check.prediction, check.gold, check.options)
        finally:
            ended = True
            signal.setitimer(signal.ITIMER_REAL, 0)
    except MemoryError:
        raise
    except RecursionError:
        return unparsable("nested too deeply")
    except Exception as failure:  # noqa: BLE001 — the boundary of the judge's code: its failure is an error, never a verdict
        return error(f"{check.kind}: {type(failure).__name__}: {failure}"[:500])


def read_frame(channel: socket.socket) -> tuple[bytes, float] | None:
    header = read_exactly(channel, REQUEST.size)
    if header is None:
        return None
    length, limit_s = REQUEST.unpack(header)
    payload = read_exactly(channel, length)
    return None if payload is None else (payload, limit_s)


def read_exactly(channel: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        piece = channel.recv(count - len(parts))
        if not piece:
            return None
        parts += piece
    return bytes(parts)


def main(control: socket.socket, memory_mb: int, names: Sequence[str]) -> None:
    """Runs the forkserver: imports the judges once, then forks one worker per request on ``control``.

    ``memory_mb`` limits one worker, and ``names`` is `verifier.judges`.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    judges = judges_of(names)
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
                serve(channel, memory_mb, judges)
            os._exit(0)
        os.close(descriptors[0])
        control.send(str(process).encode())


if __name__ == "__main__":
    import sys

    die_with_parent(signal.SIGKILL)
    main(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])
