"""Assigns the sequences of an optimizer batch to micro-batches and ranks. Deterministic, pure integer arithmetic.

A *plan* is ``plan[rank][round]`` = indices of sequences. Ranks work in lock-step, so the planner wants few rounds,
slots (rank × round) of nearly equal size, and similar slots in the same round. A slot is empty only if there are fewer
sequences than slots.

Shapes: N sequences, S slots, A slots to relieve, P candidate partners of each, K picked sequences.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.config.sections.training import MOST_SEEN

Plan = list[list[list[int]]]

LOCKSTEP = 0.9995
"""Tokens / (ranks × Σ over rounds of the longest micro-batch) at which levelling stops."""
MAX_FITTING_SWEEPS = 64
"""Sweeps that look for a packing into fewer slots. Each slot less saves a whole micro-batch."""
MAX_LEVELLING_SWEEPS = 16
"""Sweeps that level the slots, by which ranks wait less for each other."""
MAX_IDLE_SWEEPS = 8
"""Consecutive sweeps without improvement after which a try ends."""
PARTNERS_PER_SLOT = 3
"""Candidate partners in a sweep while slots are overfull, per slot of the plan."""
MAX_PICKED = 5
"""Sequences of a slot that one exchange may move. All their subsets are compared."""
SUBSETS = [np.arange(2**k)[None, :] >> np.arange(k)[:, None] & 1 for k in range(MAX_PICKED + 1)]
"""``SUBSETS[k][i, s]`` int [k, 2^k]: whether subset ``s`` of ``k`` sequences contains the ``i``-th."""


def plan_packed(lengths: Sequence[int], num_ranks: int, capacity: int) -> Plan:
    """Pack sequences of 1 … ``capacity`` tokens into micro-batches of nearly equal length, at most ``capacity`` tokens.

    ``num_ranks``: ranks that work in lock-step.
    """
    lengths_N = np.asarray(lengths, dtype=np.int64)
    assert ((lengths_N > 0) & (lengths_N <= capacity)).all(), "sequences must fit a micro-batch"
    slot_N, num_slots = _fewest_rounds(lengths_N, num_ranks, capacity)
    order = np.argsort(slot_N, kind="stable")
    slots = np.split(order, np.searchsorted(slot_N[order], np.arange(1, num_slots)))
    return _to_ranks([slot.tolist() for slot in slots], _loads(slot_N, lengths_N, num_slots).tolist(), num_ranks)


def plan_unpacked(lengths: Sequence[int], num_ranks: int, sequences_per_slot: int) -> Plan:
    """Plan micro-batches of at most ``sequences_per_slot`` sequences of similar length, so that padding is small.

    ``num_ranks``: ranks that work in lock-step.
    """
    rounds = max(1, -(-len(lengths) // (sequences_per_slot * num_ranks)))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    slots = [part.tolist() for part in np.array_split(np.asarray(order, dtype=np.int64), rounds * num_ranks)]
    padded = [len(slot) * max((lengths[i] for i in slot), default=0) for slot in slots]
    return _to_ranks(slots, padded, num_ranks)


BUNDLES = (1, 2, 4, 8, 16)
"""Parts of a micro-batch that a bundle of sequences with one prefix may fill, the largest first."""


def plan_shared(
    lengths: Sequence[int],
    untrained: Sequence[int],
    order: np.ndarray,
    shared: np.ndarray,
    num_ranks: int,
    capacity: int,
) -> Plan:
    """As ``plan_packed``, where a prefix that sequences of a micro-batch have in common is computed once.

    Bundles of neighbours in lexicographic order are packed like sequences. Large bundles compute less, small ones make
    ranks more equal, so several sizes are tried. The plan whose longest micro-batches have the fewest tokens is taken.

    Args:
        untrained: tokens of each sequence that are not trained. Only these can be saved, so that a micro-batch also
            trains at most ``capacity`` tokens.
        order, shared: of ``sort_by_prefix``.
    """
    if not shared.any():
        return plan_packed(lengths, num_ranks, capacity)
    tree = _Tree(np.asarray(lengths)[order], np.asarray(untrained)[order], shared)
    assert ((tree.lengths_N > 0) & (tree.lengths_N <= capacity)).all(), "sequences must fit a micro-batch"
    found = []
    for limit in (*(capacity // part for part in BUNDLES), 0):
        bundles = tree.bundles(limit)
        slot_B, num_slots = _fewest_rounds(np.array([tree.tokens(b) for b in bundles]), num_ranks, capacity)
        members: list[list[int]] = [[] for _ in range(num_slots)]
        for slot, bundle in zip(slot_B.tolist(), bundles, strict=True):
            members[slot] += bundle.tolist()  # ascending, as the bundles are
        tokens = [tree.tokens(np.array(slot, dtype=np.int64)) for slot in members]
        found.append((sum(sorted(tokens, reverse=True)[::num_ranks]), members, tokens))
    _, members, tokens = min(found, key=lambda plan: plan[0])
    return _to_ranks([order[slot].tolist() for slot in members], tokens, num_ranks)


@dataclass(frozen=True)
class _Tree:
    """Sequences in lexicographic order."""

    lengths_N: np.ndarray
    untrained_N: np.ndarray
    shared_N: np.ndarray
    """Tokens that each has in common with its predecessor."""

    def tokens(self, places: np.ndarray) -> int:
        """Tokens of a slot that the sequences at ascending ``places`` take: those computed, or `MOST_SEEN` seen."""
        if not len(places):
            return 0
        # Two sequences have in common what all neighbours between them have.
        common = np.minimum.reduceat(self.shared_N[: places[-1] + 1], places[:-1] + 1) if len(places) > 1 else 0
        saved = np.minimum(common, self.untrained_N[places[1:]])
        seen = int(self.lengths_N[places].sum())
        return max(seen - int(np.sum(saved)), -(-seen // MOST_SEEN))

    def bundles(self, limit: int) -> list[np.ndarray]:
        """Runs of neighbours with common prefixes, each of at most ``limit`` tokens, or a single sequence."""
        lengths = self.lengths_N.tolist()
        adds = (self.lengths_N - np.minimum(self.shared_N, self.untrained_N)).tolist()
        starts, tokens, seen = [0], lengths[0], lengths[0]
        for place in range(1, len(adds)):
            tokens, seen = tokens + adds[place], seen + lengths[place]
            if not self.shared_N[place] or tokens > limit or seen > MOST_SEEN * limit:
                starts.append(place)
                tokens = seen = lengths[place]
        return np.split(np.arange(len(adds)), starts[1:])


def fewest_slots(lengths_N: np.ndarray, capacity: int) -> int:
    """Lower bound of the slots that any packing needs (Martello and Toth, *Knapsack Problems*, 1990, bound L2).

    A sequence longer than half a slot needs its own. For a threshold ``a``, those longer than ``capacity - a`` share it
    with none of length ≥ ``a``, so what exceeds the room of the other long ones needs additional slots.
    The bound is the maximum over all ``a``.
    """
    down_N = np.sort(lengths_N)[::-1]
    total = np.concatenate(([0], np.cumsum(down_N)))
    num_long = int((2 * down_N > capacity).sum())
    thresholds = np.unique(down_N[num_long:])
    num_alone = np.searchsorted(-down_N, thresholds - capacity)
    num_counted = np.searchsorted(-down_N, -thresholds, side="right")
    room = (num_long - num_alone) * capacity - (total[num_long] - total[num_alone])
    rest = total[num_counted] - total[num_long] - room
    beside_long = num_long + int(np.maximum(0, -(-rest // capacity)).max(initial=0))
    return max(1, beside_long, -(-int(total[-1]) // capacity))


def _fewest_rounds(lengths_N: np.ndarray, num_ranks: int, capacity: int) -> tuple[np.ndarray, int]:
    """(slot of each sequence, number of slots) with the fewest rounds that are found to fit."""
    least = -(-fewest_slots(lengths_N, capacity) // num_ranks)
    for deal in (_longest_first, _long_with_long):
        found = _relieve(deal(lengths_N, least * num_ranks), lengths_N, least * num_ranks, num_ranks, capacity)
        if found is not None:
            return found, least * num_ranks
    fitted = _best_fit(lengths_N, capacity)
    low, high = least + 1, -(-(int(fitted.max()) + 1) // num_ranks)
    best = _without_empty(fitted, lengths_N, high * num_ranks)
    while low < high:
        middle = (low + high) // 2
        dealt = _long_with_long(lengths_N, middle * num_ranks)
        found = _relieve(dealt, lengths_N, middle * num_ranks, num_ranks, capacity)
        if found is None:
            low = middle + 1
        else:
            high, best = middle, found
    levelled = _relieve(best, lengths_N, high * num_ranks, num_ranks, capacity)
    assert levelled is not None, "no exchange makes a slot overfull"
    return levelled, high * num_ranks


def _loads(slot_N: np.ndarray, lengths_N: np.ndarray, num_slots: int) -> np.ndarray:
    """int64 [S]: tokens of each slot."""
    return np.bincount(slot_N, lengths_N, num_slots).astype(np.int64)


def _longest_first(lengths_N: np.ndarray, num_slots: int) -> np.ndarray:
    """Put each sequence, longest first, into the emptiest slot. Works best if slots hold many sequences."""
    order = np.argsort(-lengths_N, kind="stable")
    heap = [(0, slot) for slot in range(num_slots)]
    chosen = []
    for length in lengths_N[order].tolist():
        load, slot = heap[0]
        chosen.append(slot)
        heapq.heapreplace(heap, (load + length, slot))
    slot_N = np.empty(len(lengths_N), dtype=np.int64)
    slot_N[order] = chosen
    return slot_N


def _long_with_long(lengths_N: np.ndarray, num_slots: int) -> np.ndarray:
    """Make slots of ``k`` long sequences and slots of ``k + 1`` shorter ones. Works best if slots hold few sequences.

    With lengths of 4–8k and slots of 16k, for example, the longest must be paired, or the rest does not fit in threes.
    """
    per_slot = len(lengths_N) // num_slots
    num_few = (per_slot + 1) * num_slots - len(lengths_N)
    order = np.argsort(-lengths_N, kind="stable")
    slot_N = np.empty(len(lengths_N), dtype=np.int64)
    parts = (order[: per_slot * num_few], 0, num_few), (order[per_slot * num_few :], num_few, num_slots - num_few)
    for members, first, count in parts:
        if count:
            layer, at = np.divmod(np.arange(len(members)), count)
            slot_N[members] = first + np.where(layer % 2 == 0, at, count - 1 - at)
    return slot_N


def _best_fit(lengths_N: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing: put each sequence, longest first, into the fullest slot with room, else into a new one."""
    order = np.argsort(-lengths_N, kind="stable")
    rooms: list[tuple[int, int]] = []
    chosen: list[int] = []
    num_slots = 0
    for length in lengths_N[order].tolist():
        at = bisect_left(rooms, (length, -1))
        if at < len(rooms):
            room, slot = rooms.pop(at)
        else:
            room, slot = capacity, num_slots
            num_slots += 1
        chosen.append(slot)
        insort(rooms, (room - length, slot))
    slot_N = np.empty(len(lengths_N), dtype=np.int64)
    slot_N[order] = chosen
    return slot_N


def _without_empty(slot_N: np.ndarray, lengths_N: np.ndarray, num_slots: int) -> np.ndarray:
    """Move one sequence into each empty slot from slots that hold several, as long as there are such."""
    order = np.lexsort((-lengths_N, slot_N))
    shared = order[np.flatnonzero(np.diff(slot_N[order], prepend=-1) == 0)]
    longest = shared[np.argsort(-lengths_N[shared], kind="stable")]
    empty = np.setdiff1d(np.arange(num_slots), slot_N)[: len(longest)]
    filled_N = slot_N.copy()
    filled_N[longest[: len(empty)]] = empty
    return filled_N


def _relieve(
    slot_N: np.ndarray, lengths_N: np.ndarray, num_slots: int, num_ranks: int, capacity: int
) -> np.ndarray | None:
    """Exchange sequences until no slot is overfull and rounds are level. None if slots stay overfull."""
    rng = np.random.default_rng(0)
    slot_N = slot_N.copy()
    tokens = int(lengths_N.sum())
    fitting = levelling = idle = 0
    while True:
        loads_S = _loads(slot_N, lengths_N, num_slots)
        order_S = np.argsort(loads_S, kind="stable")
        num_overfull = int((loads_S > capacity).sum())
        costs = num_ranks * int(loads_S[order_S].reshape(-1, num_ranks)[:, -1].sum())
        level = not num_overfull and tokens >= LOCKSTEP * costs
        if level or idle == MAX_IDLE_SWEEPS or levelling == MAX_LEVELLING_SWEEPS or fitting == MAX_FITTING_SWEEPS:
            return None if num_overfull else slot_N
        num_relieved = min(num_overfull or num_slots, num_slots // 2)
        if num_relieved == 0:
            return None if num_overfull else slot_N
        relieved, others = order_S[::-1][:num_relieved], order_S[: num_slots - num_relieved]
        num_partners = max(1, PARTNERS_PER_SLOT * num_slots // num_relieved) if num_overfull else 1
        at = (rng.random((num_relieved, num_partners)) ** 2 * len(others)).astype(np.int64)  # prefers emptier slots
        at[:, 0] = np.arange(num_relieved) % len(others)
        moved = _redivide(slot_N, lengths_N, loads_S, relieved, others[at], rng)
        idle = 0 if moved else idle + 1
        fitting, levelling = fitting + (num_overfull > 0), levelling + (num_overfull == 0)


def _redivide(
    slot_N: np.ndarray,
    lengths_N: np.ndarray,
    loads_S: np.ndarray,
    relieved_A: np.ndarray,
    partners_AP: np.ndarray,
    rng: np.random.Generator,
) -> bool:
    """Exchange subsets between each slot to relieve and its best partner, in place. Returns whether any moved.

    The longer slot of a pair never becomes longer, and a slot takes part in at most one exchange.
    """
    order_N = np.argsort(slot_N, kind="stable")
    counts_S = np.bincount(slot_N, minlength=len(loads_S))
    starts_S = np.cumsum(counts_S) - counts_S
    num_picked = min(MAX_PICKED, int(counts_S.max()))
    subsets = SUBSETS[num_picked]

    def pick(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sequences, whether there is one) [..., K] of each slot. Fuller slots give one of each of K strata."""
        count = counts_S[slots][..., None]
        place = np.arange(num_picked)
        first, end = place * count // num_picked, (place + 1) * count // num_picked
        spread = first + (rng.random(first.shape) * (end - first)).astype(np.int64)
        at = np.where(count <= num_picked, place, spread)
        return order_N[np.minimum(starts_S[slots][..., None] + at, len(order_N) - 1)], at < count

    give_AK, is_give_AK = pick(relieved_A)
    take_APK, is_take_APK = pick(partners_AP)
    gap_AP = loads_S[relieved_A][:, None] - loads_S[partners_AP]
    given = (2 * np.where(is_give_AK, lengths_N[give_AK], 0) @ subsets).astype(np.int32)
    taken = (2 * np.where(is_take_APK, lengths_N[take_APK], 0) @ subsets + gap_AP[..., None]).astype(np.int32)
    difference = given[:, None, :, None] - taken[:, :, None, :]  # of the two slots after the exchange, [A, P, 2^K, 2^K]
    np.abs(difference, out=difference)
    flat = difference.reshape(*gap_AP.shape, -1)
    best_AP = flat.argmin(axis=2)
    left_AP = np.take_along_axis(flat, best_AP[..., None], axis=2)[..., 0]

    longer_AP = np.where(left_AP < gap_AP, 2 * loads_S[partners_AP] + gap_AP + left_AP, np.iinfo(np.int64).max)
    partner_A = longer_AP.argmin(axis=1)
    helps = np.flatnonzero(np.take_along_axis(left_AP < gap_AP, partner_A[:, None], axis=1)[:, 0])
    _, first = np.unique(partners_AP[helps, partner_A[helps]], return_index=True)
    a = helps[first]
    p = partner_A[a]
    give_set, take_set = np.divmod(best_AP[a, p], subsets.shape[1])
    gives = (subsets.T[give_set] > 0) & is_give_AK[a]
    takes = (subsets.T[take_set] > 0) & is_take_APK[a, p]
    slot_N[give_AK[a][gives]] = np.repeat(partners_AP[a, p], gives.sum(axis=1))
    slot_N[take_APK[a, p][takes]] = np.repeat(relieved_A[a], takes.sum(axis=1))
    return len(a) > 0


def _to_ranks(slots: list[list[int]], costs: Sequence[int], num_ranks: int) -> Plan:
    """Put slots of similar cost into one round. Its costliest slot goes to the rank with the least cost so far."""
    order = sorted(range(len(slots)), key=lambda s: (-costs[s], s))
    totals = [0] * num_ranks
    plan: Plan = [[] for _ in range(num_ranks)]
    for first in range(0, len(order), num_ranks):
        by_need = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, slot in zip(by_need, order[first : first + num_ranks], strict=True):
            plan[rank].append(slots[slot])
            totals[rank] += costs[slot]
    return plan
