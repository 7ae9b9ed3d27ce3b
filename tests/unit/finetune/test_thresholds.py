"""Which numbers of a configuration may be thresholds, and which lengths cross them."""

from types import SimpleNamespace

from pipelinerl.finetune.thresholds import arrange, candidates, crossing_lengths, lower


def make_text() -> SimpleNamespace:
    return SimpleNamespace(
        sliding_window=4096,
        index_topk=2048,
        layers=7,
        eos_token_id=50000,
        vocab_size=32000,
        tied=True,
        rope_theta=1e4,
        rope_parameters={"original_max_position_embeddings": 4096, "factor": 32.0, "long_factor": [1.0, 8, 30]},
        windows=[0, 128, 4096],
    )


def test_candidates_are_whole_numbers_anywhere_but_no_ids_and_no_factors() -> None:
    assert candidates(make_text()) == [
        ("windows", 128),
        ("index_topk", 2048),
        ("original_max_position_embeddings", 4096),
        ("sliding_window", 4096),
        ("windows", 4096),
    ]


def test_equal_values_stay_equal_and_those_beyond_the_longest_document_are_not_crossed() -> None:
    found = arrange(candidates(make_text()), longest=4096)
    assert [(t.value, t.lowered, t.is_crossed) for t in found] == [
        (128, 4, True),
        (2048, 6, True),
        (4096, 25, False),
        (4096, 25, False),
        (4096, 25, False),
    ]
    assert {t.lowered for t in arrange(candidates(make_text()), longest=4097) if t.value == 4096} == {8}
    assert all(t.is_crossed for t in arrange(candidates(make_text()), longest=None))


def test_lowered_values_stay_below_their_own_and_rise() -> None:
    found = arrange([(str(value), value) for value in range(8, 30)], longest=None)
    assert all(t.lowered < t.value for t in found)
    assert sorted({t.lowered for t in found}) == [t.lowered for t in found]


def test_documents_reach_and_exceed_every_threshold_and_the_product_of_two() -> None:
    assert sorted(crossing_lengths([4, 6, 8])) == [4, 5, 6, 7, 8, 9, 11, 17, 49]
    assert sorted(crossing_lengths([])) == [4, 5, 6, 11, 17]
    assert list(crossing_lengths([4, 6, 8])) != sorted(crossing_lengths([4, 6, 8]))


def test_settings_are_lowered_wherever_they_are() -> None:
    text = make_text()
    lower(text, {("windows", 4096): 9, ("original_max_position_embeddings", 4096): 10, ("sliding_window", 1): 3})
    assert text.windows == [0, 128, 9]
    assert text.rope_parameters["original_max_position_embeddings"] == 10
    assert text.sliding_window == 4096


def test_numbers_below_eight_are_crossed_as_they_are() -> None:
    assert candidates(SimpleNamespace(window=8, layers=7)) == [("window", 8)]
