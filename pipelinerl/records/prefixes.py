"""Common prefixes of token sequences: attempts at one problem share their prompt, turns of an agent their history.

In lexicographic order the longest prefix that a sequence shares with any earlier one is that with its predecessor. So
one sort finds the tree of all prefixes. A sequence *adds* the tokens behind that prefix.

Shapes: S sequences.
"""

from collections.abc import Sequence

import numpy as np

from pipelinerl.records.batches import MicroBatch

MIN_SHARED = 16
"""Shorter common prefixes are computed again."""
# A template begins all prompts alike, and attention costs more where a document begins in another one.


def sort_by_prefix(
    sequences: Sequence[np.ndarray], alone_S: np.ndarray | None = None, fewest: int = MIN_SHARED
) -> tuple[np.ndarray, np.ndarray]:
    """Sort sequences of token ids, each int32 [L].

    Args:
        alone_S: bool, sequences that share nothing whatever their tokens. They come last. None: there are none.
        fewest: tokens of the shortest prefix that counts.
    Returns:
        (int64 [S]: the sequences' indices in lexicographic order,
        int64 [S]: tokens that each has in common with its predecessor in this order, 0 if fewer than ``fewest``).
    """
    alone = np.zeros(len(sequences), dtype=bool) if alone_S is None else alone_S
    keys = [(own, tokens.astype(">i4").tobytes()) for own, tokens in zip(alone.tolist(), sequences, strict=True)]
    order = sorted(range(len(sequences)), key=keys.__getitem__)
    shared_S = np.zeros(len(sequences), dtype=np.int64)
    for place in range(1, len(order)):
        if alone[order[place]]:
            break
        before, own = sequences[order[place - 1]], sequences[order[place]]
        length = min(len(before), len(own))
        differs = before[:length] != own[:length]
        common = int(differs.argmax()) if differs.any() else length
        shared_S[place] = common if common >= fewest else 0
    return np.array(order, dtype=np.int64), shared_S


def prefixes_of(record: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """``sort_by_prefix`` of the segments. Those with images share nothing, since images differ where tokens do not."""
    ends_S = np.cumsum(record.segment_lengths.astype(np.int64))
    alone_S = np.zeros(len(ends_S), dtype=bool)
    if record.image_spans is not None:
        alone_S[np.searchsorted(ends_S, record.image_spans[:, 1], side="right")] = True
    return sort_by_prefix(np.split(record.token_ids, ends_S[:-1]), alone_S)
