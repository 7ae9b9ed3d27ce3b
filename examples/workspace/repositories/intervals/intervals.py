"""Sets of whole numbers, kept as intervals with both ends."""


def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the intervals in order, those that overlap or share an end as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def size(intervals: list[tuple[int, int]]) -> int:
    """Returns how many numbers lie in any of the intervals."""
    return sum(end - start + 1 for start, end in merge(intervals))
