"""Turns a domain's ``RolloutResult`` into a ``Rollout`` record: exact tokens, spans and log-probabilities.

Texts whose tokens extend each other become ONE training sequence, except in modes `texts` and `steps`, where each text
has its own reward. Lists that the domain replaced or edited take precedence over the server's.

Shapes: T tokens, K trained tokens, R spans. The module does no I/O.
"""

from dataclasses import dataclass, field

import numpy as np

from pipelinerl.errors import RecordError
from pipelinerl.records import Rollout, TrainingSequence
from pipelinerl.rollouts import MASKED_TOKEN_ID, RewardMode, RolloutResult, TrainingText, numeric_metrics, text_rewards


class SequenceTooLong(RecordError):
    """A training sequence exceeds ``finetune.seq_length``."""


@dataclass(slots=True)
class _Piece:
    """A text as arrays."""

    token_ids: np.ndarray
    positions: np.ndarray
    """int64 [K]: trained positions, ascending."""
    logprobs: np.ndarray
    """float32 [K]"""
    versions: np.ndarray
    """int32 [K]"""
    finish_reason: str
    turn: int
    routed_experts: np.ndarray | None
    """[T − 1, layers × experts per token], or None."""
    images: tuple[bytes, ...] = ()
    image_spans: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """int32 [I, 2]: (start, end exclusive) of the tokens of each image."""
    hinted_prompt: np.ndarray | None = None
    """int32 [H]: with the problem's hint, in the place of the tokens before the first trained one."""
    earlier_cut: bool = False
    """As in `TrainingSequence`."""


def to_rollout(
    result: RolloutResult,
    *,
    attempt: int,
    latency_s: float,
    num_llm_calls: int,
    sent_tokens: int = 0,
    cached_tokens: int = 0,
    num_forks: int = 0,
    num_compacted: int = 0,
    fallback_version: int,
    seq_length: int,
    rewards: RewardMode = "rollout",
) -> Rollout:
    """Builds the record of one attempt.

    Args:
        attempt: index of the attempt in its group.
        sent_tokens: prompt tokens of all its calls. ``cached_tokens`` of them came from the server's prefix cache.
        num_forks: calls among them that left sampled tokens of their conversation behind.
        num_compacted: calls among them that did so with a shorter prompt than before.
        fallback_version: oldest possible weight version, for tokens of a text that the domain built itself.
        seq_length: largest number of tokens of a training sequence.
        rewards: reward mode of a result that sets none.

    Raises:
        RecordError: a text's lists contradict each other, a reward contradicts the mode, or a reward is not finite.
        SequenceTooLong: a sequence is longer than ``seq_length``.
    """
    metrics = numeric_metrics(result)
    mode = result.rewards or rewards
    rewards_t = text_rewards(result, mode)
    pieces = [_to_piece(text, i, fallback_version) for i, text in enumerate(result.training_texts)]
    trained = [piece for piece in pieces if len(piece.positions)]
    merged = _merge(trained) if mode == "rollout" else trained
    for piece in merged:
        if len(piece.token_ids) > seq_length:
            raise SequenceTooLong(
                f"a training sequence has {len(piece.token_ids)} tokens but finetune.seq_length is {seq_length}: "
                "raise finetune.seq_length, or lower max_model_len or llm.parameters.max_tokens"
            )
    images = tuple(dict.fromkeys(image for piece in merged for image in piece.images))
    return Rollout(
        attempt=attempt,
        reward=rewards_t[0] if mode == "rollout" and rewards_t else metrics["reward"],
        sequences=tuple(_to_sequence(piece, images) for piece in merged),
        metrics=metrics,
        latency_s=latency_s,
        num_llm_calls=num_llm_calls,
        sent_tokens=sent_tokens,
        cached_tokens=cached_tokens,
        num_unmerged_turns=max(0, len(merged) - 1),
        num_forks=num_forks,
        num_compacted=num_compacted,
        rewards=mode,
        text_rewards=() if mode == "rollout" else rewards_t,
        images=images,
    )


def _to_piece(text: TrainingText, turn: int, fallback_version: int) -> _Piece:
    tokens = text.call_tokens
    if tokens is not None and text.is_lazy("input_ids", "labels", "logprobs"):
        count = len(tokens.completion_ids)
        first = len(tokens.prompt_ids)
        token_ids, positions = tokens.token_ids, np.arange(first, first + count)
        logprobs = tokens.logprobs if tokens.logprobs is not None else np.empty(0, np.float32)
    else:
        token_ids, positions, logprobs = _edited(text, turn)
    if text.visual_features is not None:
        raise RecordError(
            f"training_texts[{turn}].visual_features is set: leave it None. The images of a call are trained as the "
            "server saw them, and the trainer's own processor makes their features"
        )
    images, image_spans = _images(text, token_ids, turn)
    return _Piece(
        token_ids=token_ids,
        images=images,
        image_spans=image_spans,
        positions=positions,
        logprobs=logprobs,
        versions=_versions(text, positions, fallback_version),
        finish_reason=_finish_reason(text),
        turn=turn,
        routed_experts=_routed_experts(text, token_ids),
        hinted_prompt=_hinted_prompt(text, token_ids, positions, turn),
    )


def _hinted_prompt(text: TrainingText, token_ids: np.ndarray, positions: np.ndarray, turn: int) -> np.ndarray | None:
    """Returns the hinted prompt, and the sampled tokens before the first trained one."""
    tokens = text.call_tokens
    if tokens is None or tokens.hinted_ids is None or not len(positions):
        return None
    if not np.array_equal(tokens.token_ids, token_ids):
        raise RecordError(
            f"training_texts[{turn}].input_ids differ from the call's, and a teacher sees the problem's hint "
            "(`teachers.hint`): leave them"
        )
    return np.concatenate((tokens.hinted_ids, token_ids[len(tokens.prompt_ids) : positions[0]]))


def _routed_experts(text: TrainingText, token_ids: np.ndarray) -> np.ndarray | None:
    """Returns the server's choice of experts, or None if the text no longer has the tokens that the server saw."""
    tokens = text.call_tokens
    if tokens is None or tokens.routed_experts is None or not np.array_equal(tokens.token_ids, token_ids):
        return None
    return tokens.routed_experts


def _images(text: TrainingText, token_ids: np.ndarray, turn: int) -> tuple[tuple[bytes, ...], np.ndarray]:
    """Returns the images of a text and the tokens that stand for them."""
    tokens = text.call_tokens
    if tokens is None or tokens.image_spans is None:
        return (), np.empty((0, 2), np.int32)
    end = int(tokens.image_spans[-1, 1])
    if not np.array_equal(token_ids[:end], tokens.prompt_ids[:end]):
        raise RecordError(f"training_texts[{turn}].input_ids differ from the call's, which has images: leave them")
    return tokens.images, tokens.image_spans


def _edited(text: TrainingText, turn: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, trained positions and their log-probabilities of a text whose lists were read or changed."""
    token_ids = np.asarray(text.input_ids, dtype=np.int32)
    labels = np.asarray(text.labels, dtype=np.int64)
    logprobs = np.asarray(text.logprobs, dtype=np.float32)
    if len(labels) != len(token_ids):
        raise RecordError(f"training_texts[{turn}] has {len(token_ids)} input_ids but {len(labels)} labels")
    positions = np.flatnonzero(labels != MASKED_TOKEN_ID)
    if (labels[positions] != token_ids[positions]).any():
        raise RecordError(f"training_texts[{turn}].labels differ from input_ids where they are not {MASKED_TOKEN_ID}")
    if len(logprobs) == len(positions):
        return token_ids, positions, logprobs
    tokens = text.call_tokens
    if tokens is not None and len(tokens.completion_ids) == len(logprobs):
        sampled_from = len(tokens.prompt_ids)
    else:
        sampled_from = len(token_ids) - len(logprobs)
    indices = positions - sampled_from
    if len(indices) and (indices[0] < 0 or indices[-1] >= len(logprobs)):
        raise RecordError(
            f"training_texts[{turn}] trains {len(positions)} tokens but has {len(logprobs)} logprobs for the last ones"
        )
    return token_ids, positions, logprobs[indices]


def _versions(text: TrainingText, positions: np.ndarray, fallback_version: int) -> np.ndarray:
    tokens = text.call_tokens
    if tokens is None or not len(tokens.version_spans):
        return np.full(len(positions), fallback_version, dtype=np.int32)
    spans = tokens.version_spans
    sampled = np.repeat(spans[:, 2], spans[:, 1] - spans[:, 0])
    indices = positions - len(tokens.prompt_ids)
    if len(indices) and (indices[0] < 0 or indices[-1] >= len(sampled)):
        return np.full(len(positions), min(fallback_version, int(sampled.min())), dtype=np.int32)
    return sampled[indices]


def _finish_reason(text: TrainingText) -> str:
    """Returns the server's finish reason, or "length" if the domain set ``finished`` to False."""
    if "finished" in text.model_fields_set and not text.finished:
        return "length"
    return text.call_tokens.finish_reason if text.call_tokens is not None else "stop"


def _merge(pieces: list[_Piece]) -> list[_Piece]:
    """Joins each piece to the newest sequence that it extends. A piece that extends none starts a new sequence."""
    sequences: list[_Piece] = []
    for piece in pieces:
        for i in range(len(sequences) - 1, -1, -1):
            if _extends(piece, sequences[i]):
                sequences[i] = _joined(sequences[i], piece)
                break
        else:
            sequences.append(piece)
    return sequences


def _extends(piece: _Piece, earlier: _Piece) -> bool:
    length = len(earlier.token_ids)
    return (
        len(piece.token_ids) >= length
        and piece.images[: len(earlier.images)] == earlier.images
        and int(piece.positions[0]) >= length
        and bool((piece.token_ids[:length] == earlier.token_ids).all())
    )


def _joined(earlier: _Piece, piece: _Piece) -> _Piece:
    routed = None
    if earlier.routed_experts is not None and piece.routed_experts is not None:
        # each token keeps the choice of experts under which it was sampled
        routed = np.concatenate((earlier.routed_experts, piece.routed_experts[len(earlier.routed_experts) :]))
    return _Piece(
        token_ids=piece.token_ids,
        positions=np.concatenate((earlier.positions, piece.positions)),
        logprobs=np.concatenate((earlier.logprobs, piece.logprobs)),
        versions=np.concatenate((earlier.versions, piece.versions)),
        finish_reason=piece.finish_reason,
        turn=earlier.turn,
        images=piece.images,
        image_spans=piece.image_spans,
        routed_experts=routed,
        hinted_prompt=earlier.hinted_prompt,
        earlier_cut=earlier.earlier_cut or earlier.finish_reason == "length",
    )


def _to_sequence(piece: _Piece, images: tuple[bytes, ...]) -> TrainingSequence:
    indices = np.array([images.index(image) for image in piece.images], dtype=np.int32)
    return TrainingSequence(
        token_ids=piece.token_ids,
        logprobs=piece.logprobs,
        spans=spans_of(piece.positions, piece.versions),
        finish_reason=piece.finish_reason,
        turn=piece.turn,
        routed_experts=piece.routed_experts,
        images=np.column_stack((indices, piece.image_spans)) if piece.images else None,
        hinted_prompt=piece.hinted_prompt,
        earlier_cut=piece.earlier_cut,
    )


def spans_of(positions: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Returns maximal runs of adjacent positions with one version, int32 [R, 3]: (start, end exclusive, version).

    Args:
        positions: int64 [K], ascending.
        versions: int32 [K], weight version of each position.
    """
    if not len(positions):
        return np.empty((0, 3), dtype=np.int32)
    first, last = int(positions[0]), int(positions[-1])
    if last - first == len(positions) - 1 and (versions == versions[0]).all():  # the usual case needs no search
        return np.array([[first, last + 1, versions[0]]], dtype=np.int32)
    breaks = np.flatnonzero((np.diff(positions) != 1) | (np.diff(versions) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(positions)])) - 1
    return np.stack((positions[starts], positions[ends] + 1, versions[starts]), axis=1).astype(np.int32)
