"""Bytes by key that others may pull, also while they are still arriving. Never copies them.

The owner of a tensor withdraws its item before it changes the tensor, so no reader sees bytes of two versions.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pipelinerl.weights.protocol import Runs

REMEMBERED = 16
"""Number of withdrawn keys that are remembered as such. Older ones are unknown keys again."""


class Reader(Protocol):
    """A connection that is sending an item's bytes."""

    def interrupt(self) -> None: ...


class OtherShardError(Exception):
    """The process keeps another shard of the payload, so these bytes never come."""


class WithdrawnError(Exception):
    """The item is no longer on the registry."""


@dataclass
class Range:
    """Bytes ``start … end`` of a payload, of which those below ``upto`` are there."""

    start: int
    end: int
    upto: int
    runs: tuple[Runs, ...] = ()
    """For a shard: where its bytes lie in the payload."""


@dataclass(eq=False)
class Item:
    """One payload, or one stripe of it."""

    key: str
    buffer: torch.Tensor
    """Flat uint8, from byte ``first`` of the payload on, or the bytes of one shard of it."""
    first: int
    ranges: tuple[Range, ...]
    shard: str = ""
    """Name of the shard. Empty = these are the payload's own bytes."""
    readers: set[Reader] = field(default_factory=set)
    is_withdrawn: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all bytes of the payload, or of the stripe, are there."""
        return not self.shard and all(part.upto == part.end for part in self.ranges)

    def slice(self, start: int, end: int) -> torch.Tensor:
        return self.buffer[start - self.first : end - self.first]

    def filled(self, start: int) -> int:
        """Returns the end of the bytes that are there without a gap from ``start`` on."""
        while part := next((r for r in self.ranges if r.start <= start < r.upto), None):
            start = part.upto
        return start


class BufferRegistry:
    """All items of one process. Thread-safe."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._gone: deque[str] = deque(maxlen=REMEMBERED)
        self._changed = threading.Condition()

    def put(self, key: str, buffer: torch.Tensor, *, first: int = 0, shard: str = "") -> Item:
        """Adds an item with all its bytes. ``first`` is the place of its first byte in the payload."""
        end = first + buffer.numel()
        return self._put(Item(key, buffer, first, (Range(first, end, end),), shard))

    def receive(self, key: str, buffer: torch.Tensor, ranges: Iterable[Range], *, shard: str = "") -> Item:
        """Adds an empty item that will be filled in these ranges."""
        return self._put(Item(key, buffer, 0, tuple(ranges), shard))

    def _put(self, item: Item) -> Item:
        self.withdraw(item.key)
        with self._changed:
            self._items[item.key] = item
            if item.key in self._gone:
                self._gone.remove(item.key)
            self._changed.notify_all()
        return item

    def advance(self, item: Item, part: int, upto: int) -> None:
        """Marks the bytes below ``upto`` of range number ``part`` as there."""
        with self._changed:
            item.ranges[part].upto = upto
            self._changed.notify_all()

    def withdraw(self, *keys: str) -> None:
        """Removes items from the registry. Returns when they have no readers left."""
        with self._changed:
            for key in keys:
                item = self._items.pop(key, None)
                if item is not None:
                    self._gone.append(key)
                    item.is_withdrawn = True
                    self._changed.notify_all()
                    for reader in item.readers:
                        reader.interrupt()
                    self._changed.wait_for(lambda item=item: not item.readers)  # type: ignore[misc]

    def keep_only(self, *keys: str) -> None:
        """Withdraws all other items."""
        self.withdraw(*(key for key in tuple(self._items) if key not in keys))

    def find(self, key: str) -> Item | None:
        return self._items.get(key)

    def wait_for(self, key: str, start: int, end: int, timeout_s: float, *, shard: str = "") -> Item | None:
        """Waits for bytes ``start … end`` and returns the item, or None after ``timeout_s``.

        An item with all bytes of the payload is returned for any shard.

        Raises:
            WithdrawnError: the item was withdrawn.
            OtherShardError: the item has other bytes of the payload.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            item = self._items.get(key)
            while item is None or item.shard != shard or item.filled(start) < end:
                if item is not None and item.shard != shard:
                    if item.is_whole:
                        return item
                    raise OtherShardError
                if item.is_withdrawn if item is not None else key in self._gone:
                    raise WithdrawnError
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
                item = item or self._items.get(key)
            return item

    @contextmanager
    def reading(self, item: Item, reader: Reader) -> Iterator[None]:
        """Registers a reader. The owner waits for it before it changes the item's bytes.

        Raises:
            WithdrawnError: the item is already withdrawn.
        """
        with self._changed:
            if item.is_withdrawn:
                raise WithdrawnError
            item.readers.add(reader)
        try:
            yield
        finally:
            with self._changed:
                item.readers.discard(reader)
                self._changed.notify_all()
