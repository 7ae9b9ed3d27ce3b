"""Conversations to imitate as samples: a pure function of the data sets, the seed and the optimizer step.

Step b takes the items b·n … b·n + n − 1 of endless seeded permutations, so nothing has to be remembered for a resume. A
conversation without an answer within `finetune.seq_length` gives no sample; it is logged. Rows stay in memory, and are
rendered when their step comes.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from pipelinerl.chat.conversations import answered_texts, batch_spans
from pipelinerl.chat.rendering import ChatRenderer, template_options
from pipelinerl.config.rules import SFT_DOMAIN
from pipelinerl.config.sections import Config
from pipelinerl.domains.contract import describe_error
from pipelinerl.domains.datasets import rows_of
from pipelinerl.errors import DomainError
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import TrainingSequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What is imitated: messages and tools in OpenAI format."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def read_conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """Read a row: ``messages`` and perhaps ``tools``, or ``prompt`` and ``completion``.

    A column may be JSON as text. Fields without a value, which parquet gives to all messages alike, are left out.

    Raises:
        DomainError: the row has other columns, or a message has no role.
    """
    plain = {name: _without_nulls(_decoded(row[name])) for name in COLUMNS if row.get(name) is not None}
    if "messages" in plain:
        messages = plain["messages"]
    elif {"prompt", "completion"} <= plain.keys():
        asked = plain["prompt"]
        said = plain["completion"]
        messages = [
            *([{"role": "user", "content": asked}] if isinstance(asked, str) else asked),
            *([{"role": "assistant", "content": said}] if isinstance(said, str) else said),
        ]
    else:
        raise DomainError(
            f"{where} has the columns {sorted(row)}: a conversation has `messages` (and `tools`), or `prompt` and "
            "`completion`"
        )
    if not isinstance(messages, list) or not all(isinstance(one, dict) and one.get("role") for one in messages):
        raise DomainError(f"{where}: its messages must be a list of objects with a role and a content")
    return Conversation(messages=messages, tools=plain.get("tools") or None)


COLUMNS = ("messages", "tools", "prompt", "completion")


def _decoded(value: Any) -> Any:
    """Lists that are written as JSON are read, other text stays."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


class SupervisedData:
    """The supervised samples of every step.

    >>> data = SupervisedData(conversations, renderer, per_step=64, seed=0, seq_length=2048)
    >>> samples = data.samples(step=7)
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        renderer: ChatRenderer,
        *,
        per_step: int,
        seed: int | None,
        seq_length: int,
        prompt_weight: float = 0.0,
        template: Mapping[str, Any] | None = None,
    ):
        """Nothing is rendered yet.

        Args:
            conversations: at least one.
            renderer: of the policy's tokenizer.
            per_step: conversations of an optimizer step.
            seed: of the permutations. None: they keep their order.
            seq_length: tokens after which a text is cut.
            prompt_weight: weight of the tokens that the assistant does not say.
            template: options of the chat template (`template_options`).
        Raises:
            DomainError: there is none, or nothing that the assistant says in any of them.
        """
        if not conversations:
            raise DomainError("`sft.datasets` have no row")
        if not any(message["role"] == "assistant" for one in conversations for message in one.messages):
            count = len(conversations)
            raise DomainError(f"none of the {count} rows of `sft.datasets` has a message with the role assistant")
        self._conversations, self._renderer = conversations, renderer
        self._per_step, self._seed, self._seq_length = per_step, seed, seq_length
        self._prompt_weight, self._template = prompt_weight, dict(template or {})
        self._order = lru_cache(2)(self._permutation)

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The samples of optimizer step ``step``. Raises ``DomainError`` for a row that the template cannot render."""
        first = step * self._per_step
        return tuple(filter(None, (self._sample(place, step) for place in range(first, first + self._per_step))))

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(len(self._conversations))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._conversations))

    def _sample(self, place: int, step: int) -> Sample | None:
        epoch, position = divmod(place, len(self._conversations))
        index = int(self._order(epoch)[position])
        name = f"sft-{epoch}-{index}"
        try:
            found = list(self._sequences(self._conversations[index], step))
        except Exception as error:  # the model's template with the user's data
            raise DomainError(f"row {index} of `sft.datasets` cannot be rendered: {describe_error(error)}") from error
        if not found:
            log.warning("event=conversation_skipped row=%d reason=no answer within %d tokens", index, self._seq_length)
            return None
        return Sample(
            sample_id=f"{name}/0",
            group_id=name,
            domain=SFT_DOMAIN,
            source=(0, 0),
            reward=0.0,
            sequences=tuple((number, sequence) for number, (sequence, _) in enumerate(found)),
            advantages=(0.0,) * len(found),
            token_weights=tuple(weights_K for _, weights_K in found),
            num_tokens=sum(len(sequence.token_ids) for sequence, _ in found),
            num_trained=sum(len(weights_K) for _, weights_K in found),
            oldest_version=step,
            newest_version=step,
        )

    def _sequences(self, conversation: Conversation, step: int) -> Iterator[tuple[TrainingSequence, np.ndarray]]:
        for text in answered_texts(self._renderer, conversation.messages, conversation.tools, self._template):
            spans_R2, weights_K = batch_spans(text, self._prompt_weight, self._seq_length)
            if not (weights_K == 1).any():
                continue
            spans_R3 = np.column_stack((spans_R2, np.full(len(spans_R2), step, dtype=np.int32)))
            sequence = TrainingSequence(
                token_ids=np.array(text.token_ids[: self._seq_length], dtype=np.int32),
                logprobs=np.zeros(len(weights_K), dtype=np.float32),
                spans=spans_R3.astype(np.int32),
                finish_reason="stop",
            )
            yield sequence, weights_K


def open_supervised(cfg: Config) -> SupervisedData | None:
    """The conversations of the run's `sft.datasets`. None: it imitates none."""
    from transformers import AutoTokenizer

    from pipelinerl.chat.families import renderer_of

    per_step = cfg.batch_size if cfg.stage == "sft" else cfg.sft.per_step
    if not per_step:
        return None
    conversations = [
        read_conversation(row, f"dataset {name!r}, row {index}")
        for name in cfg.sft.datasets
        for index, row in enumerate(rows_of(name, False))
    ]
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_path, trust_remote_code=cfg.trust_remote_code)
    return SupervisedData(
        conversations,
        renderer_of(tokenizer),
        per_step=per_step,
        seed=cfg.seed,
        seq_length=cfg.finetune.seq_length,
        prompt_weight=cfg.sft.prompt_weight,
        template=template_options(cfg.llm.chat_template, cfg.llm.chat_template_kwargs, tokenizer),
    )
