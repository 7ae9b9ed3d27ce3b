"""A cache that keeps what was used most recently."""

from collections import OrderedDict


class Recent:
    """Keeps at most ``size`` values."""

    def __init__(self, size: int):
        self._size = size
        self._values: OrderedDict[str, int] = OrderedDict()

    def put(self, key: str, value: int) -> None:
        """Stores a value, and forgets the one that was not used for longest."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._size:
            self._values.popitem(last=True)

    def get(self, key: str) -> int | None:
        """Returns a value and counts as a use. None: it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)
