"""Where the trainer's ranks meet, and what they exchange. Nothing that a stranger wrote is used or unpickled.

One rank alone opens no port, the ranks of one node meet in a file of a private folder, and those of several nodes use
torch's TCP store on the address of node 0 alone, with an HMAC by the run's secret in every value and exchanged object.
A stranger on the network can still disturb the ranks: Gloo and NCCL have no credentials.
"""

import hashlib
import hmac
import os
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from pipelinerl.config.environment import RANKS_FILE_VARIABLE, SECRET_VARIABLE
from pipelinerl.errors import CheckpointError, PipelineRLError
from pipelinerl.world.network import listen_address

_MAC_BYTES = hashlib.sha256().digest_size


class ForgedError(PipelineRLError):
    """Data between the ranks was not written by a rank of this run."""


def open_rendezvous(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """Opens the store in which the process group of ``world_size`` ranks is agreed upon.

    Several ranks without a file meet at `MASTER_ADDR` and `MASTER_PORT`.
    """
    if world_size == 1:
        return dist.HashStore()
    if path := os.environ.get(RANKS_FILE_VARIABLE):
        return dist.FileStore(path, world_size)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listener = socket.create_server((listen_address(host), port)).detach() if rank == 0 else None
    timeout = timedelta(seconds=timeout_s)
    inner = dist.TCPStore(host, port, world_size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listener)
    return SealedStore(inner, _secret())


def leave_ranks() -> None:
    """Leaves the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class SealedStore(dist.Store):
    """Values of another store, each with an HMAC of its key and content. Reading a forged value raises an error.

    A process group holds only the C++ half of a store, so somebody must hold the Python half as long.
    """

    def __init__(self, inner: dist.Store, secret: bytes):
        super().__init__()
        self._inner, self._secret = inner, secret
        self._clones: list[SealedStore] = []

    def clone(self) -> "SealedStore":
        """Another store with the same content. It stays as long as this one."""
        self._clones.append(SealedStore(self._inner.clone(), self._secret))  # type: ignore[attr-defined]  # not in its stub
        return self._clones[-1]

    def set(self, key: str, value: str | bytes) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, seal(content, self._secret, key))  # type: ignore[arg-type]  # bytes are taken

    def get(self, key: str) -> bytes:
        return unseal(self._inner.get(key), self._secret, key)

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._inner.wait(keys) if timeout is None else self._inner.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)


def seal(content: bytes, secret: bytes, purpose: str) -> bytes:
    """Puts an HMAC in front of ``content``. ``purpose`` keeps a value from being used for something else."""
    return hmac.digest(secret, purpose.encode() + b"\0" + content, "sha256") + content


def unseal(sealed: bytes, secret: bytes, purpose: str) -> bytes:
    """Returns the content of ``seal``. Raises ``ForgedError`` if it was not sealed so."""
    content = sealed[_MAC_BYTES:]
    if not hmac.compare_digest(seal(content, secret, purpose)[:_MAC_BYTES], sealed[:_MAC_BYTES]):
        raise ForgedError(f"{purpose}: not written by a rank of this run; somebody else writes to the trainer's ports")
    return content


def gather_objects(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's ``value``, by rank. Collective.

    Args:
        value: anything that can be pickled.
        device: where the group's tensors must be.
        group: None = the default group.

    Raises:
        ForgedError: a value came from somewhere else. Nothing of it was unpickled.
    """
    mine = seal(pickle.dumps(value), _secret(), "object")
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(each) for each in sizes]
    return [_opened(blob) for blob in _gather_bytes(mine, lengths, device, group)]


def _gather_bytes(
    mine: bytes, lengths: Sequence[int], device: torch.device, group: dist.ProcessGroup | None
) -> list[bytes]:
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    blobs = [torch.empty(max(lengths), dtype=torch.uint8, device=device) for _ in lengths]
    dist.all_gather(blobs, padded.to(device), group=group)
    return [blob[:length].cpu().numpy().tobytes() for blob, length in zip(blobs, lengths, strict=True)]


def _opened(blob: bytes) -> Any:
    return pickle.loads(unseal(blob, _secret(), "object"))


def _secret() -> bytes:
    return os.environ.get(SECRET_VARIABLE, "").encode()


T = TypeVar("T")


class Peers:
    """Collective operations among all ranks, in a Gloo group, by one thread at a time. One rank sends nothing."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        """Collective if ``world_size`` > 1. The default process group must exist then."""
        self.rank, self.world_size = rank, world_size
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank. Collective."""
        if self.world_size == 1:
            return [value]
        return gather_objects(value, torch.device("cpu"), self._group)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` and return every rank's result, by rank. Collective.

        Raises:
            CheckpointError: on all ranks, if ``work`` failed on any rank.
        """
        result, failure = None, None
        try:
            result = work()
        except (OSError, SafetensorError, CheckpointError, ValueError, RuntimeError) as error:
            failure = str(error) or type(error).__name__
        answers = self.gather((result, failure))
        failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason]
        if failures:
            raise CheckpointError("; ".join(failures) if self.world_size > 1 else str(failure))
        return [answer for answer, _ in answers]  # type: ignore[misc]
