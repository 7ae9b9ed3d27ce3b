"""The journal of answers: a rollout that a crash interrupted is played again, and gets its first answers from here.

    file = frame of RecordedAnswer, frame of RecordedAnswer, …, frame of PLAYED, …       (``streams.frames``)

One file per attempt, in folder ``answers`` of the actor's job. A frame's offset is its number in the file. The
first damaged frame ends the file. A play that begins with recorded answers notes PLAYED behind them: after
``MAX_PLAYS`` notes the attempt is sampled anew, because its answers may end its machine each time. Beside the file lies
that of the attempt's environment (``agents.environment``). The judgement of a whole group is one frame of
RecordedJudgement in a file of its own.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import numpy as np

from pipelinerl.actor.messages import JUDGEMENT
from pipelinerl.actor.router import GroupRoute
from pipelinerl.errors import StreamError, TransportError
from pipelinerl.llm import GenerateRequest, TrainableLLM, Transport
from pipelinerl.records import Rollout
from pipelinerl.records.answers import Completion
from pipelinerl.rollouts import CallTokens
from pipelinerl.streams.codec import Codec
from pipelinerl.streams.frames import framed, only_payload, parse_frame
from pipelinerl.world.disk import make_folder

log = logging.getLogger(__name__)

FOLDER = "answers"
KEY_BYTES = 16
"""128 bits, so that no two requests of an attempt have one key by chance."""
PLAYED = b"played"
MAX_PLAYS = 5
WRITE_TIMEOUT_S = 5.0
"""Longest wait of an answer for its record: then the attempt goes on without a journal, as a slow disk is no error."""
READ_TIMEOUT_S = 120.0
"""After a crash, a worker's groups are read one after another."""


class Diverged(TransportError):
    """The attempt sends another request than the recorded attempt did."""


class RecordedAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and its answer. What the request holds of the answer is left out."""

    key: bytes
    """``request_key`` of the request."""
    completion: Completion
    prompt_ids: np.ndarray | None = None
    """int32 [P]: a prompt with images as the model read it. None: as sent."""
    image_spans: np.ndarray | None = None
    """int32 [I, 2]: of ``prompt_ids``, as in ``CallTokens``. None without images."""
    servers: dict[str, int] = {}
    """``GroupRoute.used`` when the answer came."""
    overlapped: bool = False
    """Whether the attempt waited for another answer at the same time."""


class RecordedJudgement(msgspec.Struct, frozen=True):
    """The rewards of a group by its domain's `judge_group`."""

    key: bytes
    """``judgement_key`` of the rollouts."""
    rewards: dict[int, float]
    """By attempt."""


_codec: Codec[RecordedAnswer] = Codec(RecordedAnswer)
_judgements: Codec[RecordedJudgement] = Codec(RecordedJudgement)
_reading, _writing = ThreadPoolExecutor(1, "answers_read"), ThreadPoolExecutor(1, "answers_written")


def request_key(request: GenerateRequest) -> bytes:
    """Returns a digest of what was asked: prompt tokens, images, sampling parameters."""
    # without the seed: it depends on the order of an attempt's requests, and says nothing about the distribution
    prompt, body = request.key
    if b'"seed"' in body:
        parameters = msgspec.json.decode(body)
        parameters.pop("seed", None)
        body = msgspec.json.encode(parameters)
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=KEY_BYTES)
    digest.update(prompt)
    digest.update(body)
    return digest.digest()


def judgement_key(rollouts: Iterable[Rollout]) -> bytes:
    """Returns a digest of what was sampled: attempts and tokens."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for rollout in rollouts:
        tokens = [sequence.token_ids.tobytes() for sequence in rollout.sequences]
        digest.update(msgspec.msgpack.encode((rollout.attempt, tokens)))
    return digest.digest()


class AttemptFile:
    """The recorded answers of one attempt. One process writes it: the worker that plays the attempt.

    Attributes:
        answers: those that the file held when it was opened.
        environment_file: beside it, for the steps of the attempt's environment.
        has_failed: whether the disk failed. Then the file stays as it is.
    """

    def __init__(self, path: Path):
        self._path = path
        self.environment_file = environment_file(path)
        content, self.has_failed = b"", False
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            pass
        except OSError as error:
            self.fail(error)
        self.answers, self._end, self._plays = _read(content)
        self._count = len(self.answers)

    def begin_play(self) -> None:
        """Notes a play that begins with recorded answers. After ``MAX_PLAYS`` they are forgotten instead."""
        if not self.answers:
            return
        if self._plays >= MAX_PLAYS:
            log.warning("event=recorded_answers_given_up file=%s plays=%d", self._path, self._plays)
            self.clear()
            return
        self._plays += 1
        self._write(b"".join(framed(self._count + i, PLAYED) for i in range(self._plays)))

    def end_play(self) -> None:
        """Takes the notes back: the attempt ended, and its process outlived it."""
        if self._plays:
            self._plays = 0
            self._write(b"")

    def append(self, answer: RecordedAnswer) -> None:
        frame = framed(self._count, _codec.encode(answer))
        if self._write(frame):
            self._count += 1
            self._plays = 0
            self._end += len(frame)

    def clear(self) -> None:
        """Forgets all answers, and the environment's steps. The next answer is written in their place."""
        _remove([self.environment_file])
        self.answers, self._end, self._count, self._plays = [], 0, 0, 0

    def fail(self, reason: Exception | str) -> None:
        """Writes nothing from now on."""
        self.has_failed = True
        log.warning("event=answer_not_recorded file=%s reason=%s", self._path, reason)

    def _write(self, frames: bytes) -> bool:
        """Writes frames behind the last answer, in the place of what is there. Returns whether the disk did."""
        if self.has_failed:
            return False
        try:
            # Opened for every answer: thousands of open files would leave no room for connections.
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
                file.truncate(self._end)
                file.seek(self._end)
                if file.write(frames) != len(frames):
                    raise OSError("no space is left")
        except OSError as error:
            self.fail(error)
            return False
        return True


def _read(content: bytes) -> tuple[list[RecordedAnswer], int, int]:
    """Returns the answers at the beginning of a file that are whole, where the last one ends, and the plays noted."""
    answers: list[RecordedAnswer] = []
    end, plays, place = 0, 0, 0
    try:
        while (frame := parse_frame(content, place, len(answers) + plays)) is not None:
            place = frame.end
            if frame.payload == PLAYED:
                plays += 1
            else:
                answers.append(_codec.decode(frame.payload))
                end = place
    except StreamError as error:
        log.warning("event=recorded_answers_damaged after=%d reason=%s", len(answers), error)
    return answers, end, plays


async def _written(function: Callable[..., object], *args: Any) -> None:
    """Runs a function that writes. Raises ``TimeoutError`` when it takes too long: it may still run then."""
    writing = asyncio.get_running_loop().run_in_executor(_writing, function, *args)
    await asyncio.wait_for(writing, WRITE_TIMEOUT_S)


class AnswerJournal:
    """The recorded answers of an actor's attempts. Workers open and write them, the actor removes them."""

    def __init__(self, job_folder: Path):
        self._folder = job_folder / FOLDER
        self._removing: Future[None] | None = None
        make_folder(self._folder)

    async def open(self, group_id: str, attempts: Iterable[int]) -> dict[int, AttemptFile]:
        """Reads the answers of a group to be played, by attempt. Nothing if the disk does not answer in time."""
        # all at once: attempts that begin together ask together, and their equal first requests are joined

        def read() -> dict[int, AttemptFile]:
            files = {attempt: AttemptFile(self._path(group_id, attempt)) for attempt in attempts}
            for file in files.values():
                file.begin_play()
            return files

        try:
            return await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(_reading, read), READ_TIMEOUT_S)
        except TimeoutError:
            log.warning("event=answers_not_recorded group=%s reason=disk_timeout", group_id)
            return {}

    async def judgement(self, group_id: str, key: bytes) -> dict[int, float] | None:
        """Returns the recorded rewards of a group. None: there are none for rollouts of this key."""

        def read() -> RecordedJudgement | None:
            try:
                return _judgements.decode(only_payload(self._path(group_id, JUDGEMENT).read_bytes()))
            except (OSError, StreamError):
                return None

        with contextlib.suppress(TimeoutError):
            reading = asyncio.get_running_loop().run_in_executor(_reading, read)
            found = await asyncio.wait_for(reading, READ_TIMEOUT_S)
            if found is not None and found.key == key:
                return found.rewards
        return None

    async def record_judgement(self, group_id: str, judgement: RecordedJudgement) -> None:
        """Records the rewards of a group. A disk that fails or is slow costs their record alone."""
        path, frame = self._path(group_id, JUDGEMENT), framed(0, _judgements.encode(judgement))
        try:
            await _written(path.write_bytes, frame)
        except (OSError, TimeoutError) as error:
            log.warning("event=judgement_not_recorded file=%s reason=%r", path, error)

    def remove(self, group_id: str, attempts: Iterable[int]) -> None:
        """Forgets the answers of attempts that no worker plays, before they are played anew."""
        _remove(self._paths(group_id, attempts))

    def resolve(self, group_id: str, attempts: Iterable[int]) -> None:
        """Forgets the answers of a group that is published or dropped, in another thread. ``flush`` awaits it."""
        self._removing = _writing.submit(_remove, self._paths(group_id, (*attempts, JUDGEMENT)))

    def flush(self) -> None:
        """Waits until the answers of resolved groups are removed."""
        if self._removing is not None:
            self._removing.result()

    def clear(self) -> None:
        """Forgets all answers. No worker may play an attempt."""
        self.flush()
        _remove(self._folder.iterdir())

    def _path(self, group_id: str, attempt: int) -> Path:
        return self._folder / f"{quote(group_id, safe='')}.{attempt}"

    def _paths(self, group_id: str, attempts: Iterable[int]) -> list[Path]:
        paths = [self._path(group_id, attempt) for attempt in attempts]
        return paths + [environment_file(path) for path in paths]


def environment_file(path: Path) -> Path:
    """Returns the file beside an attempt's answers."""
    return path.with_name(f"{path.name}.environment")


def _remove(paths: Iterable[Path]) -> None:
    try:
        for path in paths:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("event=recorded_answers_left reason=%s", error)


class AttemptTransport:
    """Carries the requests of one attempt (see ``llm.Transport``): answers those that are recorded, records the others.

    Requests that came one after another must come again in that order. Requests that overlapped may come in any order,
    and beside others. Every recorded answer must be asked for until the attempt ends.

    Args:
        file: answers of the attempt before a crash.
        route: gets the servers that sampled the recorded answers.
    """

    def __init__(self, file: AttemptFile, transport: Transport, route: GroupRoute):
        self._file, self._transport, self._route = file, transport, route
        self._left = list(file.answers)
        """Recorded answers that were not asked for again."""
        self._any_order = any(answer.overlapped for answer in file.answers)
        self._waiting = 0
        """Requests that are being sampled."""
        self._diverged = False
        self.num_taken = 0
        """Requests answered from the file."""

    @property
    def versions(self) -> list[int]:
        """Weight versions that sampled the recorded answers."""
        spans = [answer.completion.version_spans for answer in self._file.answers]
        return [int(version) for found in spans if found is not None for version in found[:, 2]]

    def has_diverged(self, ended: bool) -> bool:
        """Whether the attempt asked for something else than before. ``ended``: nothing outside it ended it."""
        return self._diverged or (ended and bool(self._left))

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: aiohttp.ClientSession) -> CallTokens:
        """Returns the recorded answer, or samples one and records it. Raises ``Diverged``, also ever after."""
        key = request_key(request)
        recorded = self._take(key)
        if recorded is not None:
            self.num_taken += 1
            self._route.add_used(recorded.servers)
            return _tokens(recorded, request)
        if self._diverged or (self._left and not self._any_order):
            self._diverged = True
            raise Diverged("the rollout asks for something else than it did before a crash: it starts anew")
        self._waiting += 1
        try:
            tokens = await self._transport.generate(llm, request, session)
            answer = _recorded(key, request, tokens, self._route.used, overlapped=self._waiting > 1)
            await self._record(answer)
        finally:
            self._waiting -= 1
        return tokens

    async def _record(self, answer: RecordedAnswer) -> None:
        """Records an answer. One for which the disk takes too long is the last of its attempt."""
        if self._file.has_failed:
            return
        try:
            await _written(self._file.append, answer)
        except TimeoutError:
            self._file.fail("disk_timeout")

    async def end(self) -> None:
        if self._file.answers:
            with contextlib.suppress(TimeoutError):
                await _written(self._file.end_play)

    def _take(self, key: bytes) -> RecordedAnswer | None:
        places = range(len(self._left)) if self._any_order else range(min(1, len(self._left)))
        place = next((i for i in places if self._left[i].key == key), None)
        return None if place is None or self._diverged else self._left.pop(place)


def _recorded(
    key: bytes, request: GenerateRequest, tokens: CallTokens, servers: dict[str, int], *, overlapped: bool
) -> RecordedAnswer:
    return RecordedAnswer(
        key=key,
        completion=Completion(
            token_ids=tokens.completion_ids,
            logprobs=tokens.logprobs,
            version_spans=tokens.version_spans,
            finish_reason=tokens.finish_reason,
            cached_tokens=tokens.cached_tokens,
            routed_experts=tokens.routed_experts,  # trained with the answer, where routing is replayed
        ),
        prompt_ids=tokens.prompt_ids if request.images else None,
        image_spans=tokens.image_spans,
        servers=servers,
        overlapped=overlapped,
    )


def _tokens(answer: RecordedAnswer, request: GenerateRequest) -> CallTokens:
    completion = answer.completion
    assert completion.version_spans is not None
    return CallTokens(
        prompt_ids=request.token_ids if answer.prompt_ids is None else answer.prompt_ids,
        completion_ids=completion.token_ids,
        logprobs=completion.logprobs,
        version_spans=completion.version_spans,
        finish_reason=completion.finish_reason,
        cached_tokens=completion.cached_tokens,
        routed_experts=completion.routed_experts,
        images=request.images,
        image_spans=answer.image_spans,
    )
