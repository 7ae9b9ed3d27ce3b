"""Adds another model's log-probs of exactly the trained tokens to samples: the reference's or a teacher's.

Works in a thread with its own event loop. Waits for: the reference servers, at most ``deadline_s`` from the first
failure of a request; then the role fails and names the server. No value is ever guessed: if the server refuses tokens,
or a log-prob is not finite, the sample is dropped (`not_scored`). docs/algorithms.md §3 has the use in the loss.
"""

import asyncio
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.servers import ScoringModel, SideModel
from pipelinerl.errors import ConfigError, DeadlineError, RecordError, ServerError, StreamError, TransportError
from pipelinerl.preprocess.samples import SCORES, Sample
from pipelinerl.records import TrainingSequence
from pipelinerl.records.answers import ANSWER_PATH, IMAGE_FORMAT, TEXT_FORMAT, Answer, AnswerRequest
from pipelinerl.records.check import LARGEST_NUMBER
from pipelinerl.records.drops import DropReason
from pipelinerl.streams.codec import Codec
from pipelinerl.world import Job
from pipelinerl.world.tls import client_context

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 5.0
"""Waits between two tries. A server that starts again takes a minute, so a few seconds later are little."""
REQUEST_TOKENS = 32_768
"""Short sequences of a group share requests of up to this many tokens."""
REFUSED = (400, 413, 422)
"""HTTP statuses of tokens that no server can ever score."""
REQUEST_TIMEOUT_S = 600.0
"""Longest wait for the scores of a request, the server's queue included."""
_request_codec: Codec[AnswerRequest] = Codec(AnswerRequest)
_answer_codec: Codec[Answer] = Codec(Answer)


class Scores(NamedTuple):
    """Scores of one sequence of T tokens. Entry t is about token t after tokens 0 … t − 1, entry 0 is 0."""

    logprobs_T: np.ndarray
    """float32: of the sequence's own token."""
    top_ids_TJ: np.ndarray | None = None
    """int32: the J most likely tokens, best first. None: not asked for."""
    top_logprobs_TJ: np.ndarray | None = None
    """float32: their log-probabilities."""
    version: int | None = None
    """As `Answer.scored_by`."""


REFERENCE = ScoringModel(path="", column="ref_logprobs")


def check_placed(servers: Sequence[Job], model: ScoringModel = REFERENCE) -> None:
    """Raise ``ConfigError`` if no server of a ``model`` is placed that the loss needs."""
    if not servers:
        raise ConfigError(
            f"the loss needs the log-probs of {model.name}, but no server of it is placed: raise "
            "world.preprocessor_fraction, or change finetune.rl (kl_coef, final_kl_coef) and teachers"
        )


def servers_of(jobs: Iterable[Job], models: Sequence[SideModel], model: ScoringModel) -> list[Job]:
    """The servers of one of the run's ``models``, which take turns in the numbers of servers."""
    return [job for job in jobs if models[job.replica_idx % len(models)] == model]


def merged(scored: Sequence[Sequence[Sample]], models: Sequence[ScoringModel]) -> list[Sample]:
    """Samples with the scores of all ``models``, one of ``scored`` each. What any model refuses is dropped."""
    samples = list(scored[0])
    for found, model in zip(scored[1:], models[1:], strict=True):
        samples = [
            replace(
                sample,
                drop_reason=sample.drop_reason or other.drop_reason,
                **(_columns_of(other, model) if model.scores(sample.domain) else {}),
            )
            for sample, other in zip(samples, found, strict=True)
        ]
    return samples


def trained_values(values_T: np.ndarray, sequence: TrainingSequence) -> np.ndarray:
    """[K, …]: the entries of ``values_T`` at the trained tokens of ``sequence``."""
    return np.concatenate([values_T[start:end] for start, end, _ in sequence.spans.tolist()])


Columns = dict[str, np.ndarray]
"""[K, …] by the sample's field that gets it."""
Result = Columns | RecordError
"""Or the reason why there is none."""


def trained_scores(scores: Scores, sequence: TrainingSequence, model: ScoringModel) -> Columns:
    """The scores of a ``model`` for the trained tokens of ``sequence``.

    Raises:
        TransportError: it follows the policy, but the scores are of its file: its server has just started.
    """
    columns: Columns = {model.column: trained_values(scores.logprobs_T, sequence)}
    if scores.top_ids_TJ is not None and scores.top_logprobs_TJ is not None:
        columns["teacher_top_ids"] = trained_values(scores.top_ids_TJ, sequence)
        columns["teacher_top_logprobs"] = trained_values(scores.top_logprobs_TJ, sequence)
    if model.ema is not None:
        if scores.version is None:
            raise TransportError(f"the server of {model.name} has not been sent any weights yet")
        columns["teacher_versions"] = np.full(columns[model.column].shape, scores.version, dtype=np.int32)
    return columns


def as_hinted(sequence: TrainingSequence) -> TrainingSequence:
    """The sequence as a teacher reads it that sees the problem's hint: the same trained tokens behind another prompt.

    Raises:
        RecordError: its actor gave it no such prompt.
    """
    if sequence.hinted_prompt is None:
        raise RecordError("a teacher sees hints, but a sequence has no hinted_prompt: its actor knew of no hint")
    first = int(sequence.spans[0, 0])
    shift = np.array([len(sequence.hinted_prompt) - first] * 2 + [0], dtype=np.int32)
    return msgspec.structs.replace(
        sequence,
        token_ids=np.concatenate((sequence.hinted_prompt, sequence.token_ids[first:])),
        spans=sequence.spans + shift,
        routed_experts=None,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """A sequence to score, and its sample."""

    sample_id: str
    sequence: TrainingSequence
    images: tuple[bytes, ...] = ()
    """The images of the sample."""

    def shown(self) -> tuple[tuple[bytes, ...], np.ndarray | None]:
        """The images of the sequence, and int32 [I, 2], the tokens that stand for each."""
        if self.sequence.images is None:
            return (), None
        return tuple(self.images[index] for index in self.sequence.images[:, 0]), self.sequence.images[:, 1:]


def batches(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Divide sequences into requests of at most ``REQUEST_TOKENS`` tokens.

    A longer sequence gets its own, and so does one with images.
    """
    batches: list[list[Asked]] = []
    room = 0
    for one in asked:
        length = len(one.sequence.token_ids) if one.sequence.images is None else REQUEST_TOKENS
        if length > room:
            batches.append([])
            room = REQUEST_TOKENS
        batches[-1].append(one)
        room -= length
    return batches


def _with_scores(sample: Sample, results: Sequence[Result], model: ScoringModel) -> Sample:
    refused = next((result for result in results if isinstance(result, RecordError)), None)
    found = [result for result in results if not isinstance(result, RecordError)]
    values = [values for columns in found for values in columns.values()]
    if refused is None and not all((np.abs(one) <= LARGEST_NUMBER).all() for one in values):
        refused = RecordError(f"a log-prob of {model.name} is not within ±{LARGEST_NUMBER:g}")
    if refused is not None:
        log.warning("event=sample_refused sample=%s reason=%s", sample.sample_id, refused)
        return replace(sample, drop_reason=DropReason.NOT_SCORED)
    fields: dict[str, Any] = {name: tuple(columns[name] for columns in found) for name in found[0]}
    return replace(sample, **fields)


def _without_unhinted(sample: Sample) -> Sample:
    """Drops a sample with a sequence for which its actor gave no hinted prompt: its domain built the text itself."""
    if all(sequence.hinted_prompt is not None for _, sequence in sample.sequences):
        return sample
    log.warning(
        "event=sample_refused sample=%s reason=a teacher sees hints, and it has no hinted_prompt", sample.sample_id
    )
    return replace(sample, drop_reason=DropReason.NO_HINT)


def _columns_of(sample: Sample, model: ScoringModel) -> dict[str, Any]:
    """The fields of a sample that ``model`` has filled."""
    names = SCORES[1:] if model.column == "teacher_logprobs" else SCORES[:1]
    return {name: getattr(sample, name) for name in names}


class ReferenceScorer:
    """Scores samples on one model's servers, with a bounded number of concurrent requests to each.

    >>> scorer = ReferenceScorer(lambda: servers, concurrency=64, deadline_s=600)
    >>> samples = scorer.submit(samples).result()
    >>> scorer.close()
    """

    def __init__(
        self,
        servers: Callable[[], Collection[Job]],
        *,
        concurrency: int,
        deadline_s: float,
        model: ScoringModel = REFERENCE,
    ):
        """Start the thread.

        Args:
            servers: returns the servers that are live now. Called before every request.
            concurrency: largest number of concurrent requests to a server.
            deadline_s: how long a failed request is retried.
            model: what the servers serve. Samples of other domains than its own stay as they are.
        """
        self._servers, self._model = servers, model
        self._deadline_s = deadline_s
        self._turns = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._slots: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(concurrency))
        self._session: aiohttp.ClientSession | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="reference", daemon=True)
        self._thread.start()

    def submit(self, samples: list[Sample]) -> Future[list[Sample]]:
        """Start to score ``samples``. The future returns them in order."""
        return self._run(self._score_all(samples))

    def close(self) -> None:
        """Cancel the requests in progress and end the thread."""
        self._run(self._shut_down()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _shut_down(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _score_all(self, samples: list[Sample]) -> list[Sample]:
        model = self._model

        def is_scored(sample: Sample) -> bool:
            return sample.drop_reason is None and model.scores(sample.domain)

        if model.hint:
            samples = [_without_unhinted(sample) if is_scored(sample) else sample for sample in samples]
        good = {id(sample) for sample in samples if is_scored(sample)}
        asked = [
            Asked(each.sample_id, as_hinted(sequence) if model.hint else sequence, each.images)
            for each in samples
            if id(each) in good
            for _, sequence in each.sequences
        ]
        scored = await asyncio.gather(*(self._score(batch) for batch in batches(asked)))
        results = iter([result for batch in scored for result in batch])
        return [
            _with_scores(sample, [next(results) for _ in sample.sequences], model) if id(sample) in good else sample
            for sample in samples
        ]

    async def _score(self, asked: list[Asked]) -> list[Result]:
        """Try the servers in turn until the deadline. Sequences that are refused together are sent one by one."""
        deadline: float | None = None
        backoff_s = FIRST_BACKOFF_S
        while True:
            name = "none"
            try:
                server = self._next_server()
                name = server.name
                async with self._slots[server.name]:
                    token_ids = [one.sequence.token_ids for one in asked]
                    images, spans = asked[0].shown()
                    scores = await score_sequences(
                        self._open_session(),
                        server.url,
                        token_ids,
                        images=images,
                        image_spans=spans,
                        num_top=self._model.num_top,
                    )
                return [
                    trained_scores(one, each.sequence, self._model) for one, each in zip(scores, asked, strict=True)
                ]
            except (TransportError, aiohttp.ClientError, TimeoutError) as error:
                if isinstance(error, ServerError) and error.status in REFUSED:
                    if len(asked) == 1:
                        return [RecordError(f"{name} refuses to score it: {error}")]
                    return [result for one in asked for result in await self._score([one])]
                deadline = deadline or time.monotonic() + self._deadline_s
                if time.monotonic() + backoff_s > deadline:
                    raise DeadlineError(
                        f"no log-probs of {self._model.name} for {asked[0].sample_id} within {self._deadline_s:.0f} s; "
                        f"the last server was {name} (see its log.txt): {error}"
                    ) from error
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    def _next_server(self) -> Job:
        servers = list(self._servers())
        if not servers:
            raise TransportError(f"no server of {self._model.name} is in the run")
        return servers[next(self._turns) % len(servers)]

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {os.environ.get(SECRET_VARIABLE, '')}"}
            connector = aiohttp.TCPConnector(limit=0, ssl=client_context())
            self._session = aiohttp.ClientSession(connector=connector, headers=headers)
        return self._session


async def score_sequences(
    session: aiohttp.ClientSession,
    url: str,
    sequences: Sequence[np.ndarray],
    *,
    images: tuple[bytes, ...] = (),
    image_spans: np.ndarray | None = None,
    num_top: int = 0,
) -> list[Scores]:
    """Returns the log-probabilities of several sequences' tokens under a server's model, with one request.

    Args:
        url: the server, e.g. ``http://127.0.0.1:8000``.
        sequences: int [T] each. With images there is one.
        images: encoded images of that one.
        image_spans: int32 [I, 2], the tokens that stand for each.
        num_top: J, most likely tokens of each place.

    Raises:
        ServerError: the server answered with a failure status (400: one of these sequences can never be scored).
        TransportError: no answer, or one that is not about these tokens.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    token_ids = np.concatenate(sequences).astype(np.int32, copy=False)
    lengths = [len(sequence) for sequence in sequences]
    try:
        request = _encode_request(token_ids, lengths, images, image_spans, num_top)
        async with session.post(url + ANSWER_PATH, data=request, timeout=timeout) as response:
            body = await response.read()
            if response.status != 200:
                message = body[:500].decode(errors="replace")
                raise ServerError(f"{url} answered {response.status}: {message}", response.status)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TransportError(f"{url} did not answer: {type(error).__name__} {error}") from error
    try:
        answer = _answer_codec.decode(body)
    except StreamError as error:
        raise TransportError(f"not an answer with scores: {error}") from error
    ends = np.cumsum(lengths)[:-1]
    columns = [_split(answer.prompt_scores, np.float32, token_ids.shape, ends)]
    if num_top:
        shape = (len(token_ids), num_top)
        columns += [_split(answer.top_ids, np.int32, shape, ends), _split(answer.top_scores, np.float32, shape, ends)]
    return [Scores(*values)._replace(version=answer.scored_by) for values in zip(*columns, strict=True)]


def _split(
    values: np.ndarray | None, dtype: type[np.generic], shape: tuple[int, ...], ends: np.ndarray
) -> list[np.ndarray]:
    if values is None or values.dtype != dtype or values.shape != shape:
        found = "nothing" if values is None else f"{values.dtype} {values.shape}"
        raise TransportError(f"{shape[0]} tokens were sent, and {found} were scored, not {shape}")
    return np.split(values, ends)


def _encode_request(
    token_ids: np.ndarray,
    lengths: list[int],
    images: tuple[bytes, ...],
    image_spans: np.ndarray | None,
    num_top: int,
) -> bytes:
    return _request_codec.encode(
        AnswerRequest(
            token_ids=token_ids,
            scores=True,
            top_scores=num_top,
            prompt_lengths=np.array(lengths, dtype=np.int32),
            images=images,
            image_spans=image_spans,
            format=IMAGE_FORMAT if images else TEXT_FORMAT,
        )
    )
