"""Conversations to imitate as samples: a pure function of the data sets, the seed and the optimizer step.

Step b takes the items b·n … b·n + n − 1 of endless seeded permutations, so nothing has to be remembered for a resume.
A conversation that cannot be rendered, or has no answer within `finetune.seq_length`, is counted and gives no sample.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pipelinerl.chat.conversations import LeftOutByTemplateError, answered_texts, batch_spans
from pipelinerl.chat.rendering import ChatRenderer, template_options
from pipelinerl.config.rules.experiment import SFT_DOMAIN
from pipelinerl.config.sections import Config
from pipelinerl.domains.contract import describe_error
from pipelinerl.domains.rows import MAX_LEFT_OUT, RowReport, UnusableRow
from pipelinerl.preprocess.conversation_rows import Conversation, load_conversations
from pipelinerl.preprocess.samples import Sample
from pipelinerl.records import TrainingSequence

log = logging.getLogger(__name__)


FIRST_ROWS = 100
"""`sft.max_left_out` is a share of at least this many rows, so that a bad row among the first ends no run."""


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
        max_left_out: float = MAX_LEFT_OUT,
        num_left_out: int = 0,
        held_out: bool = False,
    ):
        """Nothing is rendered yet.

        Args:
            conversations: at least one.
            renderer: of the policy's tokenizer.
            per_step: conversations of an optimizer step.
            seed: of the permutations. None: they keep their order.
            seq_length: tokens after which a text is cut.
            prompt_weight: weight of the tokens of other roles.
            max_left_out: largest share of the conversations that may give no sample.
            num_left_out: rows that were left out before.
            held_out: they are those of `sft.test_datasets`.
        """
        self._conversations, self._renderer = conversations, renderer
        self._per_step, self._seed, self._seq_length = per_step, seed, seq_length
        self._prompt_weight, self._template = prompt_weight, dict(template or {})
        self._order = lru_cache(2)(self._permutation)
        self._max_left_out, self._left_out_before = max_left_out, num_left_out
        self._report = RowReport(dataset="sft.test_datasets" if held_out else "sft.datasets")
        self._name = "sft-test" if held_out else "sft"
        self._is_usable: dict[int, bool] = {}

    @property
    def num_left_out(self) -> int:
        """Rows that are not imitated, of those that were read."""
        return self._left_out_before + self._report.left_out.total()

    @property
    def num_used(self) -> int:
        """Rows that are, or may yet be, imitated."""
        return len(self._conversations) - self._report.left_out.total()

    def samples(self, step: int) -> tuple[Sample, ...]:
        """The samples of optimizer step ``step``, at least one.

        Raises:
            DomainError: no row gives a sample, or more do not than `sft.max_left_out` allows.
        """
        first, found = step * self._per_step, list[Sample]()
        for place in range(first, first + self._per_step + len(self._conversations)):
            if found and place >= first + self._per_step:
                break
            if (sample := self._sample(place, step)) is not None:
                found.append(sample)
        if not found:
            raise self._report.refusal("No row is left to imitate")
        return tuple(found)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._seed is None:
            return np.arange(len(self._conversations))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._conversations))

    def _sample(self, place: int, step: int) -> Sample | None:
        epoch, position = divmod(place, len(self._conversations))
        index = int(self._order(epoch)[position])
        name = f"{self._name}-{epoch}-{index}"
        if not self._is_usable.get(index, True):
            return None
        try:
            found = self._rendered(self._conversations[index], step)
        except UnusableRow as error:
            self._leave_out(index, error)
            return None
        if index not in self._is_usable:
            self._is_usable[index] = True
            self._report.kept += 1
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

    def _leave_out(self, index: int, error: UnusableRow) -> None:
        dataset, row = self._conversations[index].source
        is_first = error.reason not in self._report.left_out
        self._is_usable[index] = False
        self._report.leave_out(row, UnusableRow(error.reason, f"{error.detail} (dataset {dataset!r})".lstrip()))
        if is_first:
            log.warning("event=rows_left_out %s", self._report.lines()[-1])
        seen = max(len(self._is_usable), min(FIRST_ROWS, len(self._conversations)))
        if self._report.left_out.total() > self._max_left_out * seen:
            raise self._report.refusal(f"Mend them, or allow it with `sft.max_left_out` (now {self._max_left_out})")

    def _rendered(self, conversation: Conversation, step: int) -> list[tuple[TrainingSequence, np.ndarray]]:
        """Sequences and the weights of their trained tokens. Raises ``UnusableRow`` if there are none."""
        try:
            found = list(self._sequences(conversation, step))
        except LeftOutByTemplateError as error:
            raise UnusableRow(str(error)) from error
        except Exception as error:  # the model's template with the user's data
            raise UnusableRow("it cannot be rendered", describe_error(error)) from error
        if not found:
            raise UnusableRow(f"it has no answer within `finetune.seq_length`={self._seq_length} tokens")
        return found

    def _sequences(self, conversation: Conversation, step: int) -> Iterator[tuple[TrainingSequence, np.ndarray]]:
        weights = conversation.answer_weights
        prompt_weight = self._prompt_weight * conversation.weight * conversation.trains_prompt
        for text in answered_texts(self._renderer, conversation.messages, conversation.tools, self._template):
            spans_R2, weights_K = batch_spans(text, prompt_weight, self._seq_length, weights)
            if not len(weights_K):
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
    per_step = cfg.batch_size if cfg.stage == "sft" else cfg.sft.per_step
    return _open(cfg, cfg.sft.datasets, per_step) if per_step else None


def open_held_out(cfg: Config) -> SupervisedData | None:
    """The conversations of `sft.test_datasets`, all of them in each step. None: there are none."""
    return _open(cfg, cfg.sft.test_datasets, None) if cfg.sft.test_datasets else None


def _open(cfg: Config, names: Sequence[str], per_step: int | None) -> SupervisedData:
    """``per_step`` None: the held-out ones, all of them in each step."""
    from transformers import AutoTokenizer

    from pipelinerl.chat.families import renderer_of

    conversations, reports = load_conversations(names, cfg.sft.max_left_out)
    for note in (note for report in reports for note in report.notes()):
        log.warning("event=rows_left_out %s", note)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model_path, trust_remote_code=cfg.trust_remote_code)
    return SupervisedData(
        conversations,
        renderer_of(tokenizer),
        per_step=per_step or len(conversations),
        seed=cfg.seed if per_step else None,
        seq_length=cfg.finetune.seq_length,
        prompt_weight=cfg.sft.prompt_weight,
        template=template_options(cfg.llm.chat_template, cfg.llm.chat_template_kwargs, tokenizer),
        max_left_out=cfg.sft.max_left_out,
        num_left_out=sum(report.left_out.total() for report in reports),
        held_out=per_step is None,
    )
