"""Which sequences share a request for reference log-probabilities."""

import numpy as np

from pipelinerl.preprocess import reference
from pipelinerl.preprocess.reference import Asked, batches
from pipelinerl.records import TrainingSequence


def asked(length: int, rows: list[list[int]] | None = None) -> Asked:
    sequence = TrainingSequence(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(0, np.float32),
        spans=np.zeros((0, 3), np.int32),
        finish_reason="stop",
        images=None if rows is None else np.array(rows, np.int32),
    )
    return Asked(f"s{length}", sequence, (b"a", b"b"))


def test_short_sequences_share_a_request_and_one_with_images_has_its_own() -> None:
    limit = reference.REQUEST_TOKENS
    texts = [asked(5), asked(7), asked(limit)]
    pictures = [asked(3, [[1, 0, 2]]), asked(4, [[0, 0, 1]])]
    found = batches([*texts[:2], *pictures, texts[0], texts[2]])
    assert [[len(one.sequence.token_ids) for one in batch] for batch in found] == [[5, 7], [3], [4], [5], [limit]]


def test_images_of_a_sequence_are_sent_with_the_places_of_their_tokens() -> None:
    images, spans = asked(6, [[1, 0, 2], [0, 3, 4]]).shown()
    assert images == (b"b", b"a")
    assert spans is not None
    assert spans.tolist() == [[0, 2], [3, 4]]
    assert asked(6).shown() == ((), None)


def test_request_has_at_most_32768_tokens() -> None:
    assert [len(batch) for batch in batches([asked(8192)] * 5)] == [4, 1]
