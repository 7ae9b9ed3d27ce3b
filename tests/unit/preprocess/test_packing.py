"""Packing: nothing lost, capacity kept, ranks in lock-step, by hand and by property."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.preprocess.metrics import packing_quality
from pipelinerl.preprocess.packing import Plan, _without_empty, fewest_slots, plan_packed, plan_shared, plan_unpacked
from pipelinerl.records.prefixes import sort_by_prefix


def loads(plan, lengths):
    return np.array([[sum(lengths[i] for i in slot) for slot in rank] for rank in plan])


def members(plan):
    return sorted(i for rank in plan for slot in rank for i in slot)


@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=80),
    num_ranks=st.integers(1, 9),
    capacity=st.integers(100, 400),
)
@settings(max_examples=120, deadline=None)
def test_plan_packed_any_lengths_keeps_every_sequence_once_within_capacity(lengths, num_ranks, capacity):
    plan = plan_packed(lengths, num_ranks, capacity)
    assert members(plan) == list(range(len(lengths)))
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    assert loads(plan, lengths).max() <= capacity
    assert plan == plan_packed(lengths, num_ranks, capacity)


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), num_ranks=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_plan_packed_slots_are_empty_only_where_sequences_are_fewer_than_slots(lengths, num_ranks):
    plan = plan_packed(lengths, num_ranks, 128)
    slots = [slot for rank in plan for slot in rank]
    empty = sum(not slot for slot in slots)
    assert empty == max(0, len(slots) - len(lengths))


def test_plan_packed_exact_fit_uses_the_fewest_rounds():
    """8 + 2, 7 + 3, 6 + 4 and 5 + 5 fill four slots of 10: two rounds on two ranks, nothing to spare."""
    lengths = [8, 7, 6, 5, 5, 4, 3, 2]
    assert loads(plan_packed(lengths, 2, 10), lengths).tolist() == [[10, 10], [10, 10]]


def test_plan_packed_one_long_sequence_is_levelled_by_the_others():
    lengths = [9, 3, 3, 3]
    assert loads(plan_packed(lengths, 2, 20), lengths).tolist() == [[9], [9]]


def test_plan_packed_fewer_sequences_than_ranks_leaves_single_slots_empty():
    assert sorted(map(str, plan_packed([5, 4], 4, 10))) == ["[[0]]", "[[1]]", "[[]]", "[[]]"]


def test_plan_packed_slots_that_best_fit_leaves_empty_get_a_sequence():
    """Capacity 11, 33 tokens: three slots would have to be full, but 8 needs 3. Best fit makes 11 | 8 + 2 | 5 + 5 | 2,
    so two rounds of three ranks, and of the six slots each can have one of the six sequences."""
    plan = plan_packed([2, 8, 2, 11, 5, 5], 3, 11)
    assert sorted(len(slot) for rank in plan for slot in rank) == [1] * 6


def test_without_empty_moves_sequences_of_shared_slots_longest_first():
    """Slots of 7 + 5 + 3, nothing, 4 + 6, nothing, nothing: 5, 4 and 3 move. With a slot more, one stays empty."""
    slots, lengths = np.array([0, 0, 0, 2, 2]), np.array([5, 7, 3, 4, 6])
    assert _without_empty(slots, lengths, 5).tolist() == [1, 0, 4, 3, 2]
    assert _without_empty(slots, lengths, 6).tolist() == [1, 0, 4, 3, 2]
    assert _without_empty(slots, lengths, 4).tolist() == [1, 0, 0, 3, 2]
    assert slots.tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("samples", [256, 1024])
def test_plan_packed_log_normal_lengths_level_ranks_and_rounds(samples):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(np.log(1500), 0.8, samples), 200, 8000).astype(int).tolist()
        tokens = loads(plan_packed(lengths, 8, 16_384), lengths)
        quality = packing_quality(tokens, 0, 16_384)
        assert quality.rank_imbalance < 0.01
        assert quality.lockstep > 0.97
        assert quality.level > 0.97
        assert tokens.shape[1] == -(-sum(lengths) // (8 * 16_384)), "no round more than the tokens need"


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7))
@settings(max_examples=80, deadline=None)
def test_fewest_slots_never_more_than_the_best_packing(lengths):
    """The best packing by trying every slot for every sequence."""

    def best(rest, loads):
        if not rest:
            return len(loads)
        fits = [i for i, load in enumerate(loads) if load + rest[0] <= 12]
        tries = [[*loads[:i], loads[i] + rest[0], *loads[i + 1 :]] for i in fits]
        return min(best(rest[1:], each) for each in [*tries, [*loads, rest[0]]])

    assert -(-sum(lengths) // 12) <= fewest_slots(np.array(lengths), 12) <= best(lengths, [])


def test_fewest_slots_counts_what_does_not_fit_beside_the_long():
    """Capacity 10: three of 7 stand alone with room 3 each; four of 4 do not fit beside them, two a slot: 3 + 2."""
    assert fewest_slots(np.array([7, 7, 7, 4, 4, 4, 4]), 10) == 5


@pytest.mark.parametrize(
    ("low", "high", "rounds"),
    [(4000, 8000, 97), (5461, 5461, 86), (8193, 8700, 256), (16_384, 16_384, 256)],
    ids=["twos and threes", "threes", "none beside another", "full"],
)
def test_plan_packed_few_sequences_per_slot_few_rounds(low, high, rounds):
    """2,048 sequences in slots of 16k on 8 ranks. Of lengths uniform in 4–8k, at best the longest 27 % go in pairs and
    the rest, 5,460 on average, in threes: 0.378 slots per sequence, 97 rounds; one more is allowed."""
    lengths = np.random.default_rng(1).integers(low, high + 1, 2048).tolist()
    plan = plan_packed(lengths, 8, 16_384)
    tokens = loads(plan, lengths)
    assert members(plan) == list(range(2048))
    assert tokens.max() <= 16_384
    assert tokens.shape[1] <= rounds + (low == 4000)
    assert packing_quality(tokens, 0, 16_384).lockstep > 0.999


def test_plan_unpacked_full_micro_batches_of_neighbours_in_length():
    lengths = [1, 9, 2, 8, 3, 7, 4, 6]
    plan = plan_unpacked(lengths, 2, 2)
    assert members(plan) == list(range(8))
    assert {tuple(sorted(lengths[i] for i in slot)) for rank in plan for slot in rank} == {
        (8, 9),
        (6, 7),
        (3, 4),
        (1, 2),
    }
    assert [len(rank) for rank in plan] == [2, 2]


def test_plan_unpacked_uneven_count_leaves_no_slot_empty():
    plan = plan_unpacked([5] * 10, 2, 4)
    assert sorted(len(slot) for rank in plan for slot in rank) == [2, 2, 3, 3]


def test_packing_quality_by_hand():
    """Ranks 8 + 4 and 6 + 0 of capacity 10: 18 of 40 filled; mean per rank 9; rounds cost 8 and 4."""
    quality = packing_quality(np.array([[8, 4], [6, 0]]), 1, 10)
    assert quality.filled == pytest.approx(18 / 40)
    assert quality.level == pytest.approx(18 / 32)
    assert quality.rank_imbalance == pytest.approx(3 / 9)
    assert quality.lockstep == pytest.approx(18 / (2 * 12))


def trie_tokens(sequences, slot):
    """Distinct prefixes of the slot's sequences: what computing each common prefix once computes."""
    return len({tuple(sequences[i][:end]) for i in slot for end in range(1, len(sequences[i]) + 1)})


def plan_sequences(sequences, num_ranks, capacity, trained=0) -> Plan:
    order, shared = sort_by_prefix([np.array(sequence, dtype=np.int32) for sequence in sequences], fewest=1)
    lengths = [len(sequence) for sequence in sequences]
    return plan_shared(lengths, [n - trained for n in lengths], order, shared, num_ranks, capacity)


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=40),
    num_ranks=st.integers(1, 5),
    capacity=st.integers(12, 60),
)
@settings(max_examples=120, deadline=None)
def test_plan_shared_any_trees_keep_every_sequence_once_within_capacity(sequences, num_ranks, capacity):
    plan = plan_sequences(sequences, num_ranks, capacity)
    assert members(plan) == list(range(len(sequences)))
    assert len({len(rank) for rank in plan}) == 1
    assert max(trie_tokens(sequences, slot) for rank in plan for slot in rank) <= capacity


def test_plan_shared_keeps_the_attempts_at_a_problem_together():
    """Four problems of 3 attempts, prompts of 6, answers of 1: 9 tokens a problem, 21 if each attempt had a prompt."""
    sequences = [[problem] * 6 + [10 + attempt] for attempt in range(3) for problem in range(4)]
    plan = plan_sequences(sequences, 2, 18)
    assert sorted(sorted({sequences[i][0] for i in slot}) for rank in plan for slot in rank) in (
        [[0, 1], [2, 3]],
        [[0, 2], [1, 3]],
        [[0, 3], [1, 2]],
    )


def test_plan_shared_divides_a_problem_where_ranks_would_wait():
    """One problem of 8 attempts on 2 ranks: 2 + 8 × 4 tokens on one, or 2 + 4 × 4 on each."""
    sequences = [[1, 2] + [10 + attempt] * 4 for attempt in range(8)]
    plan = plan_sequences(sequences, 2, 100)
    assert [trie_tokens(sequences, slots[0]) for slots in plan] == [18, 18]


def test_plan_shared_counts_tokens_that_are_trained_twice():
    """Equal attempts compute 4 tokens in all, but each trains its last 2: three of them are 2 + 3 × 2."""
    plan = plan_sequences([[1, 2, 3, 4]] * 6, 1, 8, trained=2)
    assert sorted(len(slot) for slot in plan[0]) == [3, 3]


def test_plan_shared_repeats_a_prefix_only_so_often():
    """Equal sequences compute 10 tokens in all, and a micro-batch of 30 sees at most 8 × 30 = 24 × 10."""
    assert [len(rank) for rank in plan_sequences([[1] * 10] * 24, 1, 30)] == [1]
    assert sorted(len(slot) for slot in plan_sequences([[1] * 10] * 25, 1, 30)[0]) == [12, 13]


def test_plan_shared_without_common_prefixes_is_plan_packed():
    lengths = np.random.default_rng(0).integers(1, 50, 200).tolist()
    sequences = [[i] * length for i, length in enumerate(lengths)]
    order, shared = sort_by_prefix([np.array(sequence, dtype=np.int32) for sequence in sequences])
    assert plan_shared(lengths, lengths, order, shared, 3, 100) == plan_packed(lengths, 3, 100)
