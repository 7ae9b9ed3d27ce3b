"""Which sequence goes into which micro-batch of which rank: pure integer arithmetic, deterministic.

An optimizer batch is given; nothing here moves a sequence to another step. Ranks work in lock-step: in every round
each rank does one micro-batch and the longest decides. So the number of rounds is the smallest that can hold the
tokens, all slots (rank × round) are made as equal as possible, and slots of similar size meet in the same round.

A *plan* is ``plan[rank][round]`` = indices of sequences; a slot is empty only where sequences are fewer than slots.
"""

import heapq
from collections.abc import Sequence

import numpy as np

Plan = list[list[list[int]]]

LEVEL_TOLERANCE = 5e-3
"""Largest difference between two slots, relative to the mean, that is left as it is."""
MAX_EXCHANGES_PER_SLOT = 16


def plan_packed(lengths: Sequence[int], num_ranks: int, capacity: int) -> Plan:
    """Pack sequences into equally long micro-batches of at most ``capacity`` tokens.

    Args:
        lengths: tokens of each sequence, each in 1 … ``capacity``.
        num_ranks: ranks that work in lock-step.
        capacity: tokens per micro-batch (`finetune.seq_length`).
    """
    assert all(0 < length <= capacity for length in lengths), "sequences must fit a micro-batch"
    rounds = max(1, -(-sum(lengths) // (capacity * num_ranks)))
    while True:
        slots = _level(_longest_first(lengths, rounds * num_ranks), lengths, capacity)
        loads = [_load(slot, lengths) for slot in slots]
        if max(loads) <= capacity:
            return _to_ranks(slots, loads, num_ranks)
        rounds += 1


def plan_unpacked(lengths: Sequence[int], num_ranks: int, sequences_per_slot: int) -> Plan:
    """Micro-batches of at most ``sequences_per_slot`` sequences, neighbours in length so that padding is small."""
    rounds = max(1, -(-len(lengths) // (sequences_per_slot * num_ranks)))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    slots = [part.tolist() for part in np.array_split(np.asarray(order, dtype=np.int64), rounds * num_ranks)]
    padded = [len(slot) * max((lengths[i] for i in slot), default=0) for slot in slots]
    return _to_ranks(slots, padded, num_ranks)


def _load(slot: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in slot)


def _longest_first(lengths: Sequence[int], num_slots: int) -> list[list[int]]:
    """Longest sequence first, each into the emptiest slot."""
    slots: list[list[int]] = [[] for _ in range(num_slots)]
    heap = [(0, slot) for slot in range(num_slots)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, slot = heap[0]
        slots[slot].append(i)
        heapq.heapreplace(heap, (load + lengths[i], slot))
    return slots


def _level(slots: list[list[int]], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Moves or exchanges sequences between the fullest and an emptier slot until they are level or nothing helps."""
    slots = [list(slot) for slot in slots]
    loads = np.array([_load(slot, lengths) for slot in slots], dtype=np.int64)
    for _ in range(MAX_EXCHANGES_PER_SLOT * len(slots)):
        fullest = int(loads.argmax())
        if loads[fullest] <= capacity and loads[fullest] - loads.min() <= LEVEL_TOLERANCE * loads.mean():
            break
        for emptier in np.argsort(loads, kind="stable"):
            moved = _exchange(slots[fullest], slots[emptier], int(loads[fullest] - loads[emptier]), lengths)
            if moved:
                loads[fullest] -= moved
                loads[emptier] += moved
                break
        else:
            break
    return slots


def _exchange(source: list[int], target: list[int], gap: int, lengths: Sequence[int]) -> int:
    """Moves the tokens nearest to half the gap by one move or one exchange; returns how many, 0 if nothing helps."""
    give = np.array([lengths[i] for i in source], dtype=np.int64)
    take = np.array([lengths[i] for i in target] + [0], dtype=np.int64)
    moved = give[:, None] - take[None, :]
    error = np.where((moved > 0) & (moved < gap), np.abs(2 * moved - gap), gap)
    g, t = np.unravel_index(int(error.argmin()), error.shape)
    if error[g, t] >= gap:
        return 0
    index = source.pop(int(g))
    if t < len(target):
        source.append(target.pop(int(t)))
    target.append(index)
    return int(moved[g, t])


def _to_ranks(slots: list[list[int]], costs: Sequence[int], num_ranks: int) -> Plan:
    """Slots of similar cost meet in one round; within it the costliest goes to the rank with least so far."""
    order = sorted(range(len(slots)), key=lambda s: (-costs[s], s))
    totals = [0] * num_ranks
    plan: Plan = [[] for _ in range(num_ranks)]
    for first in range(0, len(order), num_ranks):
        by_need = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, slot in zip(by_need, order[first : first + num_ranks], strict=True):
            plan[rank].append(slots[slot])
            totals[rank] += costs[slot]
    return plan
