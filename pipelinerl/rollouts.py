"""The result of a domain's rollout function: training texts with rewards, and metrics. Public: field names are frozen.

A text made by ``make_training_text`` carries numpy arrays, and a token list is built from them at its first access.
From then on the list is authoritative: a domain may replace it or edit it in place (see ``actor/sequences.py``).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from pipelinerl.errors import DomainError, RecordError
from pipelinerl.records import RewardMode as RewardMode
from pipelinerl.records.check import LARGEST_NUMBER

MASKED_TOKEN_ID = -100
"""Label of a token that is not trained."""


@dataclass(frozen=True, slots=True, eq=False)
class CallTokens:
    """The tokens of one LLM call, exactly as sent and sampled (P prompt tokens, C completion tokens, R spans)."""

    prompt_ids: np.ndarray
    """int32 [P]"""
    completion_ids: np.ndarray
    """int32 [C]"""
    logprobs: np.ndarray | None
    """float32 [C]. None if they were not requested."""
    version_spans: np.ndarray
    """int32 [R, 3]: (start, end exclusive, weight version) over the completion. Empty if the server reports none."""
    finish_reason: str
    cached_tokens: int = 0
    """Prompt tokens that the server took from its prefix cache."""
    routed_experts: np.ndarray | None = None
    """uint8 or int16 [P + C − 1, layers × experts per token]. None if the server does not report them."""
    images: tuple[bytes, ...] = ()
    """The encoded images of the prompt."""
    image_spans: np.ndarray | None = None
    """int32 [I, 2]: (start, end exclusive) of the prompt tokens that stand for each image. None without images."""

    hinted_ids: np.ndarray | None = None
    """int32 [H]: the prompt for a teacher that sees the problem's hint. None: no teacher does."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [P + C]"""
        return np.concatenate((self.prompt_ids, self.completion_ids))


class LazyModel(BaseModel):
    """A model with fields that are computed from the arrays in ``_tokens`` at their first access."""

    _tokens: CallTokens | None = PrivateAttr(default=None)

    @property
    def call_tokens(self) -> CallTokens | None:
        """The tokens as sent and sampled. None if a domain built the object itself."""
        return self._tokens

    @classmethod
    def _lazy_fields(cls) -> dict[str, Callable[[CallTokens], list]]:
        return {}

    def attach(self, tokens: CallTokens) -> None:
        """Sets the tokens. The lazy fields are computed from them at the next access."""
        self._tokens = tokens
        for name in self._lazy_fields():
            self.__dict__.pop(name, None)

    def is_lazy(self, *names: str) -> bool:
        """Whether none of these fields was read or set, so that ``call_tokens`` holds their values."""
        return not any(name in self.__dict__ for name in names)

    def __getattr__(self, name: str) -> Any:
        private = object.__getattribute__(self, "__pydantic_private__")
        if private is not None and name in private:  # much faster than pydantic's own lookup
            return private[name]
        build = self._lazy_fields().get(name)
        if build is None:
            return super().__getattr__(name)  # type: ignore[misc]
        tokens = self._tokens
        value = build(tokens) if tokens is not None else []
        self.__dict__[name] = value
        return value

    @model_serializer(mode="wrap")
    def _materialise(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        for name in self._lazy_fields():
            getattr(self, name)
        return handler(self)


class BaseMetrics(BaseModel):
    """Metrics of one rollout. Subclass it to add numeric fields."""

    reward: float
    success: bool
    no_error: bool
    no_answer: bool


class TrainingText(LazyModel):
    """One LLM call as training data.

    ``labels`` equals ``input_ids`` where a token is trained and is -100 elsewhere. Setting more labels to -100 removes
    those tokens from training. ``logprobs`` has one entry per sampled token. If ``reward`` is not set, the text gets
    the reward of the metrics.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    text: str
    n_predicted: int
    reward: float = 0.0
    logprobs: list[float] = Field(default_factory=list)
    ref_logprobs: list[float] = Field(default_factory=list)
    input_ids: list[int] = Field(default_factory=list)
    labels: list[int] = Field(default_factory=list)
    group_id: str | None = None
    finished: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    visual_features: dict[str, np.ndarray] | None = None
    metadata: dict = Field(default_factory=dict)

    @classmethod
    def _lazy_fields(cls) -> dict[str, Callable[[CallTokens], list]]:
        return _TEXT_FIELDS

    @property
    def prompt_text(self) -> str:
        return self.text[: len(self.text) - self.n_predicted]

    @property
    def output_text(self) -> str:
        return self.text[len(self.text) - self.n_predicted :]


def _labels(tokens: CallTokens) -> list[int]:
    return [MASKED_TOKEN_ID] * len(tokens.prompt_ids) + tokens.completion_ids.tolist()


def _logprobs(tokens: CallTokens) -> list[float]:
    return [] if tokens.logprobs is None else tokens.logprobs.tolist()


_TEXT_FIELDS: dict[str, Callable[[CallTokens], list]] = {
    "input_ids": lambda tokens: tokens.token_ids.tolist(),
    "labels": _labels,
    "logprobs": _logprobs,
}


class RolloutResult(BaseModel):
    """The result of one attempt at a problem."""

    training_texts: list[TrainingText]
    metrics: BaseMetrics
    latency: float
    model_version: int | None = None
    dataset_name: str | None = None
    group_id: str | None = None
    rewards: RewardMode | None = None
    """Meaning of the texts' rewards. None: `actor.rewards`."""
    domain: str | None = None
    """The domain that a dispatcher chose. Metrics are grouped by the configuration's `domains`, not by this field."""


@dataclass(frozen=True)
class TrainingTextSummary:
    """Token counts of a rollout's texts, in order."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    overflow: bool
    """Whether a text was cut by a length limit."""
    num_turns: int


def summarize_training_texts(training_texts: Iterable[TrainingText]) -> TrainingTextSummary:
    """Collects the token counts of a rollout's texts, and whether one was cut by a length limit."""
    texts = list(training_texts)
    return TrainingTextSummary(
        prompt_tokens=[text.prompt_tokens for text in texts],
        output_tokens=[text.output_tokens for text in texts],
        overflow=rollout_has_overflow(texts),
        num_turns=len(texts),
    )


def apply_rollout_reward(training_texts: Iterable[TrainingText], reward: float) -> list[TrainingText]:
    """Sets the rollout's reward on every text, in place, and returns the texts."""
    texts = list(training_texts)
    for text in texts:
        text.reward = reward
    return texts


def rollout_has_overflow(training_texts: Iterable[TrainingText]) -> bool:
    """Whether a text was cut by a length limit, that is, not finished by the model."""
    return not all(text.finished for text in training_texts)


def check_result(result: Any, rewards: RewardMode = "rollout", *, trains: bool = True) -> RolloutResult:
    """Checks a result as the actor does, and returns it.

    Args:
        result: the return value of a rollout function.
        rewards: reward mode of a result that sets none (``actor.rewards``).
        trains: whether the result must hold at least one training text.
    Raises:
        DomainError: the result is not a ``RolloutResult``.
        RecordError: a field is missing or wrong. The message names it.
    """
    if not isinstance(result, RolloutResult):
        raise DomainError(f"it returned {type(result).__name__}: it must return a pipelinerl.rollouts.RolloutResult")
    numeric_metrics(result)
    text_rewards(result, result.rewards or rewards)
    if trains and not result.training_texts:
        raise RecordError("training_texts is empty: there is no sampled token to train on")
    return result


def numeric_metrics(result: RolloutResult) -> dict[str, float]:
    """Returns the numeric fields of the domain's metrics. Raises ``RecordError`` as ``finite`` does."""
    metrics = {"reward": finite("metrics.reward", result.metrics.reward)}
    for name, value in result.metrics.model_dump().items():
        if isinstance(value, (bool, int, float, np.number, np.bool_)):
            metrics[name] = finite(f"metrics.{name}", value)
    return metrics


def text_rewards(result: RolloutResult, mode: RewardMode) -> tuple[float, ...]:
    """Returns the reward of every text. In mode `rollout` a text without its own gets the rollout's reward.

    Raises ``RecordError`` if a reward is missing in another mode, differs within mode `rollout`, or is not ``finite``.
    """
    texts = result.training_texts
    said = ["reward" in text.model_fields_set for text in texts]
    if mode != "rollout" and not all(said):
        raise RecordError(
            f"training_texts[{said.index(False)}].reward is not set: with rewards={mode!r} every text has its own; "
            "set 0.0 for one that earns nothing"
        )
    whole = finite("metrics.reward", result.metrics.reward)
    rewards = tuple(
        finite(f"training_texts[{i}].reward", text.reward) if said[i] else whole for i, text in enumerate(texts)
    )
    different = next((i for i, reward in enumerate(rewards) if mode == "rollout" and reward != rewards[0]), None)
    if different is not None:
        raise RecordError(
            f"training_texts[{different}].reward is {rewards[different]} and training_texts[0].reward is {rewards[0]}: "
            "with rewards='rollout' all texts of a rollout have its one reward. Say what they are in RolloutResult or "
            "actor.rewards: 'texts', each its own, compared at the same step, or 'steps', increments of a return"
        )
    return rewards


def check_named_rewards(metrics: Mapping[str, float], mode: RewardMode, names: Iterable[str]) -> None:
    """Checks that a rollout reports every reward that ``finetune.rl.reward_weights`` names.

    Args:
        metrics: the rollout's metrics.
        mode: meaning of the rewards of its texts.
        names: names of the rewards.
    Raises:
        RecordError: one is missing, or the texts have rewards of their own.
    """
    for name in names:
        if mode != "rollout":
            raise RecordError(
                f"rewards={mode!r} says what each text earns, but `finetune.rl.reward_weights` names rewards of whole "
                "rollouts: remove one"
            )
        if name not in metrics:
            raise RecordError(
                f"`finetune.rl.reward_weights` names {name!r}, which the rollout does not report: its metrics are "
                f"{', '.join(sorted(metrics))}; name one of them, or add the field to the domain's metrics"
            )


def finite(name: str, value: Any) -> float:
    """Converts a domain's number to float.

    Raises ``RecordError`` with ``name`` for text, None, NaN, infinities and numbers beyond ``LARGEST_NUMBER``.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST_NUMBER:
        try:
            shown = repr(value)[:200]
        except ValueError:
            shown = f"of more digits than Python writes ({type(value).__name__})"
        raise RecordError(f"{name} is {shown}: it must be a finite number within ±{LARGEST_NUMBER:g}")
    return number
