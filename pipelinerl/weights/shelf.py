"""Bytes that others may pull, by key, while they are still coming in.

A `Shelf` never copies: an item is a flat tensor of its owner and how far each of its ranges is filled. Before the owner
changes a tensor it withdraws the item, which ends everybody who is reading it: no reader sees bytes of two versions.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Reader(Protocol):
    """Whoever is sending an item's bytes to somebody else."""

    def interrupt(self) -> None: ...


class WithdrawnError(Exception):
    """The item is not on the shelf any more."""


@dataclass
class Range:
    """Bytes ``start … end`` of a payload; those below ``upto`` are there."""

    start: int
    end: int
    upto: int


@dataclass(eq=False)
class Item:
    """One payload, or one stripe of it."""

    key: str
    buffer: torch.Tensor
    """Flat uint8, from byte ``first`` of the payload on."""
    first: int
    ranges: tuple[Range, ...]
    readers: set[Reader] = field(default_factory=set)
    is_withdrawn: bool = False

    def slice(self, start: int, end: int) -> torch.Tensor:
        return self.buffer[start - self.first : end - self.first]

    def filled(self, start: int) -> int:
        """End of the bytes from ``start`` on that are there without a gap."""
        while part := next((r for r in self.ranges if r.start <= start < r.upto), None):
            start = part.upto
        return start


class Shelf:
    """All items of one process. Thread-safe."""

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._changed = threading.Condition()

    def put(self, key: str, buffer: torch.Tensor, *, first: int = 0) -> Item:
        """An item whose bytes are all there."""
        end = first + buffer.numel()
        return self._put(Item(key, buffer, first, (Range(first, end, end),)))

    def receive(self, key: str, buffer: torch.Tensor, parts: Sequence[tuple[int, int]]) -> Item:
        """An item without a byte yet, which comes in by these (start, end)."""
        return self._put(Item(key, buffer, 0, tuple(Range(start, end, start) for start, end in parts)))

    def _put(self, item: Item) -> Item:
        self.withdraw(item.key)
        with self._changed:
            self._items[item.key] = item
            self._changed.notify_all()
        return item

    def advance(self, item: Item, part: int, upto: int) -> None:
        """Bytes below ``upto`` of a range are there now."""
        with self._changed:
            item.ranges[part].upto = upto
            self._changed.notify_all()

    def withdraw(self, *keys: str) -> None:
        """Take items off the shelf; returns when nobody reads them any more."""
        with self._changed:
            for key in keys:
                item = self._items.pop(key, None)
                if item is not None:
                    item.is_withdrawn = True
                    self._changed.notify_all()
                    for reader in item.readers:
                        reader.interrupt()
                    self._changed.wait_for(lambda item=item: not item.readers)  # type: ignore[misc]

    def keep_only(self, *keys: str) -> None:
        """Withdraw everything else."""
        self.withdraw(*(key for key in tuple(self._items) if key not in keys))

    def find(self, key: str) -> Item | None:
        return self._items.get(key)

    def wait_for(self, key: str, start: int, end: int, timeout_s: float) -> Item | None:
        """The item once it has all of ``start … end``; None if that takes longer.

        Raises:
            WithdrawnError: the item was there and is not any more.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            item = self._items.get(key)
            while item is None or item.filled(start) < end:
                if item is not None and item.is_withdrawn:
                    raise WithdrawnError
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
                item = item or self._items.get(key)
            return item

    @contextmanager
    def reading(self, item: Item, reader: Reader) -> Iterator[None]:
        """The item's bytes stay as they are meanwhile.

        Raises:
            WithdrawnError: the item is gone already.
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
