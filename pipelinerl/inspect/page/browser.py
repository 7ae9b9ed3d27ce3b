"""Decodes the rollouts that `inspect.samples` chose for the page, token by token. The result is bounded in bytes."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from pipelinerl.inspect.decode import TokenText, problem_fields, show_images
from pipelinerl.inspect.samples import SeenRollout
from pipelinerl.records import ScoredSequence, TrainingSequence

MAX_TOKENS = 3000
"""Tokens shown of one sequence. The page leaves out the middle of longer ones."""
MILLI = 1000
"""The page gets log-probabilities in thousandths of a nat."""


def within(rollouts: Iterable[SeenRollout], text: TokenText, max_bytes: int) -> list[dict[str, Any]]:
    """Return the first rollouts that fit into `max_bytes` as data of the page, sorted by step."""
    found, used = [], 0
    for rollout in rollouts:
        data = as_data(rollout, text)
        used += len(msgspec.json.encode(data))
        if used > max_bytes:
            break
        found.append(data)
    return sorted(found, key=lambda data: (data["step"] is None, data["step"] or 0, data["id"]))


def as_data(seen: SeenRollout, text: TokenText) -> dict[str, Any]:
    scores = seen.scores or (None,) * len(seen.rollout.sequences)
    advantages = seen.advantages or (None,) * len(seen.rollout.sequences)
    return {
        "id": seen.sample_id,
        "group": seen.group_id,
        "domain": seen.domain,
        "dataset": seen.dataset,
        "outcome": seen.outcome,
        "step": seen.dispatched_version if seen.is_test else seen.step,
        "reward": round(seen.rollout.reward, 4),
        "success": seen.success,
        "advantage": None if seen.advantage is None else round(seen.advantage, 4),
        "lag": seen.lag,
        "tokens": seen.rollout.num_sampled,
        "finish": seen.finish_reason,
        "versions": list(seen.versions),
        "flags": list(seen.flags),
        "servers": list(seen.rollout.servers),
        "metrics": {name: round(float(value), 4) for name, value in seen.rollout.metrics.items()},
        "problem": {name: _short(value) for name, value in problem_fields(seen.problem).items()},
        "sequences": [
            sequence_data(sequence, score, advantage, text, seen.rollout.images)
            for sequence, score, advantage in zip(seen.rollout.sequences, scores, advantages, strict=True)
        ],
    }


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= 1000 else text[:1000] + " …"


def sequence_data(
    sequence: TrainingSequence,
    score: ScoredSequence | None,
    advantage: float | None,
    text: TokenText,
    images: Sequence[bytes] = (),
) -> dict[str, Any]:
    """Return the tokens of a sequence with their values.

    `pieces` has the texts of all shown tokens and `at` the places of the sampled ones. The versions, log-probabilities
    and entropies are in the order of `at`, and `altered` has indices into it.
    """
    count = len(sequence.token_ids)
    keep = kept_tokens(count)
    cut = int(np.argmax(np.diff(keep) > 1)) + 1 if len(keep) < count else count
    pieces = [piece for part in (keep[:cut], keep[cut:]) for piece in text.pieces(sequence.token_ids[part].tolist())]
    show_images(pieces, keep, sequence, images)
    lengths = sequence.spans[:, 1] - sequence.spans[:, 0]
    positions = np.concatenate(
        [np.arange(start, end) for start, end, _ in sequence.spans.tolist()] or [np.empty(0, int)]
    )
    versions = np.repeat(sequence.spans[:, 2], lengths)
    own = np.isin(positions, keep)
    place = {int(token): index for index, token in enumerate(keep.tolist())}
    data: dict[str, Any] = {
        "pieces": pieces,
        "at": [place[int(token)] for token in positions[own].tolist()],
        "versions": versions[own].tolist(),
        "logprobs": np.rint(sequence.logprobs[own] * MILLI).astype(int).tolist(),
        "advantage": None if advantage is None else round(advantage, 4),
    }
    if len(keep) < count:
        data["omitted"] = [cut, count - len(keep)]
    if score is not None and len(score.logprobs) == len(sequence.logprobs):
        data["trained"] = np.rint(score.logprobs[own] * MILLI).astype(int).tolist()
        data["entropy"] = np.rint(score.entropy[own].astype(np.float32) * MILLI).astype(int).tolist()
        data["altered"] = np.flatnonzero(score.altered[own]).tolist()
    return data


def kept_tokens(count: int) -> np.ndarray:
    """Places of the shown tokens: a third of the limit from the beginning, two thirds from the end."""
    if count <= MAX_TOKENS:
        return np.arange(count)
    first = MAX_TOKENS // 3
    return np.concatenate([np.arange(first), np.arange(count - (MAX_TOKENS - first), count)])
