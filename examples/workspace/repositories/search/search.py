"""Searches in sorted lists."""


def first_index(items: list[int], wanted: int) -> int | None:
    """Returns the first index of ``wanted``. None: it is not there."""
    low, high = 0, len(items) - 1
    while low < high:
        middle = (low + high) // 2
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(items) - 1 and items[low] == wanted else None
