"""What clients ask of a server, and its answer: prompts as token ids, completions as packed arrays.

One record for sampling and for scoring. A field that is absent is `None` or its default, and unknown fields are
skipped, so that a later field needs no other format; ``format`` changes only when an old reader would be wrong.
Shapes: P prompt tokens, C completion tokens, R spans.
"""

from typing import Any

import msgspec
import numpy as np

ANSWER_PATH = "/answers"
ANSWER_FORMAT = 1


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Samples completions of one prompt, or scores the prompt itself."""

    token_ids: np.ndarray
    """int32 [P], P ≥ 1."""
    model: str = ""
    """Name of the model that must answer; empty = whatever the server has."""
    sampling: dict[str, Any] = {}
    """vLLM's sampling parameters; ``n`` completions; ``logprobs: 0`` asks for the log-probabilities of what was
    sampled."""
    scores: bool = False
    """Asks for the log-probability of every prompt token; nothing is sampled."""
    prompt_lengths: np.ndarray | None = None
    """int32, with ``scores`` only: ``token_ids`` holds several prompts of these lengths, each scored for itself; None =
    one."""
    prefix_version: int | None = None
    """Weight version of the first token of the conversation that the prompt continues. A server whose policy keeps
    conversations finds their keys and values under it."""
    format: int = ANSWER_FORMAT


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sampled completion."""

    token_ids: np.ndarray
    """int32 [C]"""
    logprobs: np.ndarray | None = None
    """float32 [C], natural log, of the sampled tokens; None = not asked for."""
    version_spans: np.ndarray | None = None
    """int32 [R, 3]: (start, end exclusive, weight version); None = the weights are not those of an optimizer step."""
    finish_reason: str
    """"stop", "length", "abort" or "error"."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found and not computed."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [P + C − 1, layers × experts per token]; None = not asked for."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the server answers with status 200; otherwise the body is a JSON object with ``error.message``."""

    completions: tuple[Completion, ...] = ()
    """In the order of their index."""
    prompt_scores: np.ndarray | None = None
    """float32 [P]: entry t is log p(token t | tokens 0 … t−1) of its prompt; a prompt's first is 0. None = not asked
    for."""
    format: int = ANSWER_FORMAT
