"""NCCL without GPUs: communicators among the processes of a test, which are threads of one.

It behaves as NCCL does: who connects waits for all members and has no deadline, transfers of two members match in the
order in which they were begun, and a communicator takes memory until it is destroyed or aborted.
"""

import secrets
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Network:
    """What the processes share."""

    live: Counter[int] = field(default_factory=Counter)
    """Communicators by process, those that wait for members too."""
    most: int = 0
    """The highest number that a process has had at once."""
    connects: int = 0
    """Members that ever began to connect."""
    num_bytes: int = 0
    """Bytes that came over NCCL."""
    never_joins: Callable[[int, int], bool] = lambda rank, size: False
    """Which members leave between the id and the connection."""
    loses: bool = False
    """Transfers do not end."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    _joined: dict[bytes, set[int]] = field(default_factory=lambda: defaultdict(set))
    _waiting: dict[tuple[bytes, int, int, str], deque["Move"]] = field(default_factory=lambda: defaultdict(deque))
    _processes: int = 0

    def process(self) -> "Process":
        self._processes += 1
        return Process(self, self._processes)

    def connect(self, process: int, unique_id: bytes, rank: int, size: int) -> "Communicator":
        with self.changed:
            self.connects += 1
            self.live[process] += 1
            self.most = max(self.most, self.live[process])
            if self.never_joins(rank, size):
                self.live[process] -= 1
                raise RuntimeError("this member has left")
            self._joined[unique_id].add(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self._joined[unique_id]) == size)
        return Communicator(self, process, unique_id, rank)

    def move(self, unique_id: bytes, source: int, target: int, bucket: torch.Tensor, *, gives: bool) -> "Move":
        kinds = ("give", "take") if gives else ("take", "give")
        made = Move(bucket)
        with self.changed:
            others = self._waiting[unique_id, source, target, kinds[1]]
            if self.loses or not others:
                self._waiting[unique_id, source, target, kinds[0]].append(made)
                return made
            other = others.popleft()
            sent, received = (made, other) if gives else (other, made)
            assert sent.bucket.numel() == received.bucket.numel(), "the two ends began their transfers in another order"
            received.bucket.copy_(sent.bucket)
            self.num_bytes += sent.bucket.numel()
            made.is_done = other.is_done = True
        return made


@dataclass(eq=False)
class Move:
    """One end of a transfer."""

    bucket: torch.Tensor
    is_done: bool = False


@dataclass(eq=False)
class Process:
    """What one process has loaded: stands for `pipelinerl.weights.transfer.nccl.VllmNccl`."""

    network: Network
    number: int

    def unique_id(self) -> bytes:
        return secrets.token_bytes(128)

    def connect(self, unique_id: bytes, rank: int, size: int) -> "Communicator":
        return self.network.connect(self.number, unique_id, rank, size)


@dataclass(eq=False)
class Communicator:
    """One member's end."""

    network: Network
    process: int
    unique_id: bytes
    rank: int
    is_freed: bool = False

    def start_send(self, bucket: torch.Tensor, member: int) -> Callable[[], bool]:
        move = self.network.move(self.unique_id, self.rank, member, bucket, gives=True)
        return lambda: move.is_done

    def start_receive(self, bucket: torch.Tensor, member: int) -> Callable[[], bool]:
        move = self.network.move(self.unique_id, member, self.rank, bucket, gives=False)
        return lambda: move.is_done

    def destroy(self) -> None:
        self.abort()

    def abort(self) -> None:
        with self.network.changed:
            assert not self.is_freed, "freed twice"
            self.is_freed = True
            self.network.live[self.process] -= 1
            self.network.changed.notify_all()
