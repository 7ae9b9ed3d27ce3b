"""Answers outlive a crash bit for bit, a diverging attempt starts anew, and what is resolved or faulty is forgotten."""

import asyncio
import dataclasses
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import aiohttp
import numpy as np
import pytest
from omegaconf import OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor import answer_journal
from pipelinerl.actor.answer_journal import (
    FOLDER,
    MAX_PLAYS,
    AnswerJournal,
    AttemptFile,
    AttemptTransport,
    RecordedAnswer,
    environment_file,
    request_key,
)
from pipelinerl.actor.executor import Executor, RolloutFunction, RolloutRules
from pipelinerl.actor.messages import GroupFinished, StartGroup
from pipelinerl.actor.problems import ProblemSource
from pipelinerl.actor.progress import ActorProgress, TopicJournal
from pipelinerl.actor.router import Client, GroupRoute, RequestLimits
from pipelinerl.actor.servers import ServerLoads
from pipelinerl.agents import play_text_environment
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.config.rules.experiment import DOMAIN_NAME_BYTES
from pipelinerl.llm import GenerateRequest, Prompt, TrainableLLM
from pipelinerl.records import ActorRecord, GroupDropped, OrderResumed
from pipelinerl.records.answers import Completion
from pipelinerl.records.drops import DropReason
from pipelinerl.records.order import DataOrder
from pipelinerl.rollouts import BaseMetrics, CallTokens, RolloutResult
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from pipelinerl.testing import FakeServer, byte_tokenizer
from tests.actor_stage import Stage, finished, missed_probe, sampled_by
from tests.memory_streams import MemoryBackend

TOKENIZER = byte_tokenizer()
TURNS = 5
METRICS = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)


def answer_of(i: int, **fields: Any) -> RecordedAnswer:
    ids = np.arange(i + 1, dtype=np.int32)
    return RecordedAnswer(key=bytes([i]) * 16, completion=Completion(token_ids=ids, finish_reason="stop"), **fields)


def keys(path: Path) -> list[int]:
    return [answer.key[0] for answer in AttemptFile(path).answers]


def test_file_cut_at_any_byte_of_its_last_answer_keeps_the_others_and_goes_on(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole", tmp_path / "cut"
    file, ends = AttemptFile(whole), [0]
    for i in range(3):
        file.append(answer_of(i))
        ends.append(whole.stat().st_size)
    assert keys(whole) == [0, 1, 2]
    content = whole.read_bytes()
    damaged = [content[:cut] for cut in range(ends[2], ends[3])]
    damaged += [content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :] for at in range(ends[2], ends[3])]
    damaged += [content[: ends[2]] + bytes(100), content[: ends[2]] + content[: ends[1]]]
    path.write_bytes(content[: ends[2]])
    for _ in range(2):
        AttemptFile(path).begin_play()
    played = path.read_bytes()
    assert (len(played) > ends[2], keys(path)) == (True, [0, 1])
    damaged += [played[:cut] for cut in range(ends[2], len(played) + 1)]
    for bytes_left in damaged:
        path.write_bytes(bytes_left)
        AttemptFile(path).append(answer_of(7))
        assert keys(path) == [0, 1, 7]


def test_answer_that_cannot_be_written_is_left_out_with_all_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = AttemptFile(tmp_path / "missing" / "0-0.0")
    file.append(answer_of(0))
    (tmp_path / "missing").mkdir()
    file.append(answer_of(1))
    assert [line for line in caplog.text.splitlines() if "event=answer_not_recorded" in line]
    assert keys(tmp_path / "missing" / "0-0.0") == []


def test_file_that_cannot_be_read_or_removed_costs_its_answers_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FOLDER / "0-0.0"
    path.mkdir(parents=True)  # reading and unlinking it are errors
    file = AttemptFile(path)
    file.append(answer_of(0))
    file.clear()
    assert file.answers == []
    journal = AnswerJournal(tmp_path)
    journal.remove("0-0", [0])
    journal.clear()
    assert caplog.text.count("event=answer_not_recorded") == 1
    assert caplog.text.count("event=recorded_answers_left") == 2


class Sampled:
    """A transport that answers from a list."""

    def __init__(self, *answers: CallTokens):
        self.answers = iter(answers)

    async def generate(self, llm: Any, request: GenerateRequest, session: Any) -> CallTokens:
        return next(self.answers)


def route() -> GroupRoute:
    return GroupRoute(ServerLoads(), None, 1, 0)  # type: ignore[arg-type]


def request_of(*token_ids: int, body: bytes = b"{}", images: tuple[bytes, ...] = ()) -> GenerateRequest:
    ids = np.array(token_ids, dtype=np.int32)
    return GenerateRequest(token_ids=ids, body_key=body, model="p", retries=0, base_delay_s=0.0, images=images)


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


async def test_recorded_answer_is_the_servers_bit_for_bit(tmp_path: Path) -> None:
    """Also of no token, with routed experts, and of a prompt whose image was expanded by the server."""
    ids = np.array([5, 6, 7], dtype=np.int32)
    logprobs = np.array([-0.1, -1e-30, -3.3333333], dtype=np.float32)
    plain, shown = request_of(1, 2), request_of(1, 9, 2, images=(b"png",))
    sampled = [
        CallTokens(plain.token_ids, ids, logprobs, spans((0, 1, 3), (1, 3, 4)), "stop", 2),
        CallTokens(plain.token_ids, ids[:0], logprobs[:0], spans(), "length"),
        CallTokens(plain.token_ids, ids, None, spans(), "stop", 0, np.arange(8, dtype=np.uint8).reshape(4, 2)),
        CallTokens(ids, ids, logprobs, spans((0, 3, 1)), "stop", 0, None, (b"png",), spans()[:, :2]),
    ]
    requests = [plain, plain, plain, shown]
    path = tmp_path / "0-0.0"
    first = AttemptTransport(AttemptFile(path), Sampled(*sampled), route())
    for request in requests:
        await first.generate(None, request, None)  # type: ignore[arg-type]
    again = AttemptTransport(AttemptFile(path), Sampled(), route())
    for request, tokens in zip(requests, sampled, strict=True):
        got = await again.generate(None, request, None)  # type: ignore[arg-type]
        for field in dataclasses.fields(CallTokens):
            was, now = getattr(tokens, field.name), getattr(got, field.name)
            if isinstance(was, np.ndarray):
                assert (now.dtype, now.shape, now.tobytes()) == (was.dtype, was.shape, was.tobytes()), field.name
            else:
                assert now == was, field.name
    assert (again.num_taken, again.versions) == (4, [3, 4, 1])
    assert not again.has_diverged(ended=True)


def test_key_is_of_prompt_images_and_parameters_but_not_of_the_seed() -> None:
    seeded = [request_of(1, body=b'{"seed":%d,"max_tokens":8}' % seed) for seed in (1, 2)]
    assert request_key(seeded[0]) == request_key(seeded[1]) == request_key(request_of(1, body=b'{"max_tokens":8}'))
    others = [request_of(1), request_of(2), request_of(1, 2), request_of(1, images=(b"a",))]
    assert len({request_key(request) for request in [*others, seeded[0]]}) == 5


# ---- an executor that dies in the middle of a group


Ask = Callable[[str], Any]
Agent = Callable[[Ask], Any]


class Life:
    """A worker's executor over one folder: each ``play`` is another process of the same actor."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, server: "HoldingServer"):
        self.folder, self.session, self.server = folder, session, server
        self.said: list[str] = []
        """What the agent was answered in the newest play."""

    async def play(
        self,
        agent: Agent,
        *,
        die_at: int | None = None,
        version: int = 0,
        attempts: tuple[int, ...] = (3,),
        function: RolloutFunction | None = None,
    ) -> GroupFinished | None:
        """Plays the attempts, by ``function`` if there is one.

        With ``die_at``, ends like a killed process while request number ``die_at`` waits.
        """
        self.said, self.server.version = [], version

        async def rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
            texts = []

            async def ask(content: str) -> str:
                call = await llm_async_generate(llm, Prompt.from_user_message(content), session)
                texts.append(make_training_text(llm, call))
                self.said.append(call.output.content or "")
                return self.said[-1]

            await agent(ask)
            return RolloutResult(training_texts=texts, metrics=METRICS, latency=0.0)

        llm = TrainableLLM(
            model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 8}, collect_logprobs=True
        )
        limits = RequestLimits(timeout_s=60.0, max_retries=0, max_completions=len(attempts))
        rules = RolloutRules(timeout_s=120.0, seq_length=1000)
        executor = Executor(
            *(OmegaConf.create({}), [function or rollout], (llm, llm), Client(self.session, limits), rules),
            AnswerJournal(self.folder),
        )
        executor.servers.update({"s": self.server.url}, {"s": version}, {"s": version})
        start = StartGroup(group_id="d/1-2", domain=0, problem={}, attempts=attempts, evaluation=False, version=version)
        before = len(self.server.requests)
        task = asyncio.create_task(run_whole_group(executor, start))
        if die_at is None:
            return await task
        self.server.hold_at = before + die_at
        self.server.held.clear()
        async with asyncio.timeout(60):
            await self.server.held.wait()
        task.cancel()
        await asyncio.wait([task])
        self.server.hold_at = None
        return None


class HoldingServer(FakeServer):
    """Answers at random, and never the request with index ``hold_at``."""

    hold_at: int | None = None

    def __init__(self) -> None:
        self.held = asyncio.Event()
        rng = random.Random(0)
        super().__init__(
            lambda ids, params, i: [
                *TOKENIZER.encode("".join(rng.choices(ascii_lowercase, k=5))),
                TOKENIZER.eos_token_id,
            ]
        )

    async def _answer(self, request: Any) -> Any:
        if len(self.requests) == self.hold_at:
            self.requests.append({})
            self.held.set()
            await asyncio.Event().wait()
        return await super()._answer(request)


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    async with aiohttp.ClientSession() as session, HoldingServer() as server:
        yield Life(tmp_path, session, server)


async def chat(ask: Ask) -> None:
    """Asks with what it was answered, so that a different answer makes a different next prompt."""
    told = "?"
    for _ in range(TURNS):
        told = await ask(told)


@pytest.mark.parametrize("turn", range(TURNS))
async def test_interrupted_attempt_gets_its_answers_again_and_samples_only_the_rest(life: Life, turn: int) -> None:
    await life.play(chat, die_at=turn, version=4)
    before = list(life.said)
    ended = await life.play(chat, version=6)
    assert ended is not None
    (rollout,) = ended.rollouts
    assert (life.said[:turn], len(life.said)) == (before, TURNS)
    assert len(life.server.requests) == TURNS + 1, "the request under way is the only one that is made twice"
    assert (rollout.answers_from_journal, rollout.diverged) == (turn, False)
    versions = [int(version) for sequence in rollout.sequences for version in sequence.spans[:, 2]]
    assert versions == [4] * turn + [6] * (TURNS - turn)
    assert rollout.num_llm_calls == TURNS
    assert dict(zip(rollout.servers, rollout.probes_missed, strict=True)) == {"s": 4 if turn else 6}


class Dice:
    """A world whose dice fall as they like. ``thrown``: all throws, of all processes."""

    def __init__(self, thrown: list[int]):
        self.thrown, self.mine = thrown, list[int]()

    def throw(self) -> str:
        self.thrown.append(len(self.thrown))
        self.mine.append(self.thrown[-1])
        return str(self.mine)

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return self.throw(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.throw(), 1.0, len(self.mine) > TURNS, False, {"success": True}


class KeptDice(Dice):
    def snapshot(self) -> bytes:
        return bytes(self.mine)

    async def restore(self, snapshot: bytes) -> None:
        self.mine = list(snapshot)


async def play_dice(life: Life, kind: type[Dice], thrown: list[int], **how: Any) -> GroupFinished | None:
    async def rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
        return await play_text_environment(llm, session, kind(thrown), max_turns=10)

    return await life.play(chat, function=rollout, **how)


@pytest.mark.parametrize("turn", range(TURNS))
async def test_environment_goes_on_where_the_crash_interrupted_it(life: Life, turn: int) -> None:
    """Also if the second play dies, while it waits for the turn after."""
    thrown: list[int] = []
    await play_dice(life, KeptDice, thrown, die_at=turn)
    assert len(thrown) == 1 + turn
    if turn < TURNS - 1:
        await play_dice(life, KeptDice, thrown, die_at=1)
    ended = await play_dice(life, KeptDice, thrown)
    assert ended is not None
    (rollout,) = ended.rollouts
    assert thrown == list(range(1 + TURNS)), "no step was taken twice"
    assert (rollout.reward, rollout.diverged) == (float(TURNS), False)
    assert rollout.answers_from_journal == min(turn + 1, TURNS - 1)
    journal = AnswerJournal(life.folder)
    journal.resolve("d/1-2", [3])
    journal.flush()
    assert list((life.folder / FOLDER).iterdir()) == []


async def test_second_episode_of_a_rollout_has_steps_of_its_own(life: Life) -> None:
    episodes = [KeptDice([]), KeptDice([])]

    async def rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
        await play_text_environment(llm, session, episodes[0], max_turns=10)
        return await play_text_environment(llm, session, episodes[1], max_turns=10)

    ended = await life.play(chat, function=rollout)
    assert ended is not None
    assert len(ended.rollouts) == 1
    assert [episode.thrown for episode in episodes] == [list(range(1 + TURNS))] * 2


async def test_environment_without_a_snapshot_begins_anew(life: Life) -> None:
    thrown: list[int] = []
    await play_dice(life, Dice, thrown, die_at=3)
    ended = await play_dice(life, Dice, thrown)
    assert ended is not None
    assert ended.rollouts[0].diverged
    assert len(thrown) == 4 + 1 + 1 + TURNS, "the second play noticed at its first throw"


async def test_steps_without_their_answers_are_forgotten(life: Life) -> None:
    """As when the disk failed for the answers alone."""
    thrown: list[int] = []
    await play_dice(life, KeptDice, thrown, die_at=3)
    (life.folder / FOLDER / "d%2F1-2.3").unlink()
    failed = await play_dice(life, KeptDice, thrown)
    assert failed is not None
    assert [failure.reason for failure in failed.failures] == ["transport"]
    assert len(thrown) == 4
    ended = await play_dice(life, KeptDice, thrown)
    assert ended is not None
    assert len(ended.rollouts) == 1


async def test_environment_that_cannot_be_restored_is_not_kept(life: Life) -> None:
    class Pictured(Dice):
        def snapshot(self) -> str:
            return "a picture"

    ended = await play_dice(life, Pictured, [])
    assert ended is not None
    assert len(ended.rollouts) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
async def test_damaged_steps_are_taken_again(life: Life, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    thrown: list[int] = []
    await play_dice(life, KeptDice, thrown, die_at=3)
    path = environment_file(life.folder / FOLDER / "d%2F1-2.3")
    path.write_bytes({"cut": path.read_bytes()[:-1], "empty": b"", "other": b"\xa1\xff"}[damage])
    ended = await play_dice(life, KeptDice, thrown)
    assert ended is not None
    assert ended.rollouts[0].diverged
    assert len(thrown) == 4 + 1 + 1 + TURNS, "the dice of the second play fell otherwise"
    assert caplog.text.count("event=environment_not_restored") == 1


async def test_snapshot_that_is_no_bytes_is_refused(life: Life) -> None:
    class Texts(KeptDice):
        def snapshot(self) -> Any:
            return "text"

    failed = await play_dice(life, Texts, [])
    assert failed is not None
    assert "Texts.snapshot returned str: it must return bytes" in failed.failures[0].detail


async def test_equal_first_requests_of_a_group_are_one_request(life: Life) -> None:
    """Before a crash and after it: the attempts wait for their recorded answers together."""

    async def once(ask: Ask) -> None:
        await ask("?")

    for num_attempts in (4, 32):
        before = len(life.server.requests)
        ended = await life.play(once, attempts=tuple(range(num_attempts)))
        assert ended is not None
        assert len(ended.rollouts) == num_attempts
        assert len(life.server.requests) == before + 1, "the attempts waited for their recorded answers apart"


async def test_ended_attempt_is_played_again_from_its_answers_alone(life: Life) -> None:
    """Its group was not published when the actor died: another attempt was under way."""
    first = await life.play(chat)
    again = await life.play(chat)
    assert first is not None
    assert again is not None
    assert len(life.server.requests) == TURNS
    for was, now in zip(first.rollouts[0].sequences, again.rollouts[0].sequences, strict=True):
        for field in ("token_ids", "logprobs", "spans"):
            assert getattr(was, field).tobytes() == getattr(now, field).tobytes()


async def test_attempt_that_asks_otherwise_starts_anew_and_is_counted(life: Life) -> None:
    await life.play(chat, die_at=3)
    before = list(life.said)

    async def other(ask: Ask) -> None:
        told = await ask("?")
        await ask("something else")
        await ask(told)

    ended = await life.play(other)
    assert ended is not None
    (rollout,) = ended.rollouts
    assert (rollout.diverged, rollout.answers_from_journal) == (True, 0)
    assert life.said[0] == before[0], "it was told this once"
    assert len(life.said) == 4, "and then played anew"
    assert life.said[1] != before[0]
    assert len(life.server.requests) == 3 + 1 + 3
    await life.play(other)
    assert len(life.server.requests) == 7, "the new answers are recorded in the place of the old"


async def test_attempt_that_handles_the_error_of_its_divergence_starts_anew_all_the_same(life: Life) -> None:
    await life.play(chat, die_at=3)

    async def stubborn(ask: Ask) -> None:
        for content in ("a", "?", "b"):
            try:
                await ask(content)
            except Exception:
                continue

    ended = await life.play(stubborn)
    assert ended is not None
    assert ended.rollouts[0].diverged
    assert len(life.server.requests) == 4 + 3


async def test_attempt_that_ends_before_its_last_recorded_answer_has_diverged(life: Life) -> None:
    await life.play(chat, die_at=3)

    async def short(ask: Ask) -> None:
        await ask("?")

    ended = await life.play(short)
    assert ended is not None
    (rollout,) = ended.rollouts
    assert (rollout.diverged, rollout.num_llm_calls, len(life.server.requests)) == (True, 1, 4 + 1)


async def test_attempt_that_fails_before_its_last_recorded_answer_has_diverged(life: Life) -> None:
    await life.play(chat, die_at=3)
    told = life.said[0]

    async def broken_then(ask: Ask) -> None:
        if await ask("?") == told:
            raise RuntimeError("the tool says something else today")

    ended = await life.play(broken_then)
    assert ended is not None
    assert not ended.failures
    assert ended.rollouts[0].diverged


async def test_same_request_twice_gets_both_answers_in_their_order(life: Life) -> None:
    async def twice(ask: Ask) -> None:
        for content in ("?", "?", "!", "?"):
            await ask(content)

    await life.play(twice, die_at=3)
    before = list(life.said)
    assert before[0] != before[1]
    await life.play(twice)
    assert (life.said[:3], len(life.server.requests)) == (before, 5)


async def test_parallel_requests_come_again_in_another_order_beside_new_ones(life: Life) -> None:
    """Three sub-agents of three turns. One waits for its answer when the attempt dies."""

    async def sub_agent(ask: Ask, name: str) -> None:
        told = name
        for _ in range(3):
            told = f"{name} {await ask(told)}"

    async def forwards(ask: Ask) -> None:
        await asyncio.gather(*(sub_agent(ask, name) for name in "abc"))

    async def backwards(ask: Ask) -> None:
        await asyncio.gather(*(sub_agent(ask, name) for name in "cba"))

    life.server.delay_s = 0.02
    await life.play(forwards, die_at=5)
    before = Counter(life.said)
    life.server.delay_s = 0.0
    ended = await life.play(backwards)
    assert ended is not None
    (rollout,) = ended.rollouts
    assert rollout.answers_from_journal == before.total()
    assert not rollout.diverged
    assert before <= Counter(life.said)
    assert len(life.said) == 9


async def test_server_that_fails_costs_no_answer_when_the_attempt_is_tried_again(life: Life) -> None:
    async def cut_off(ask: Ask) -> None:
        told = await ask("?")
        life.server.status = 503
        await ask(told)

    failed = await life.play(cut_off)
    assert failed is not None
    assert [failure.reason for failure in failed.failures] == ["transport"]
    told = life.said[0]
    life.server.status = 200
    ended = await life.play(chat)
    assert ended is not None
    assert (ended.rollouts[0].answers_from_journal, life.said[0]) == (1, told)


# ---- a disk that does not answer, and answers that end the machine


async def test_disk_that_does_not_answer_delays_no_rollout_for_long(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the middle of an attempt, and before one. What was recorded before is played again."""
    for limit in ("READ_TIMEOUT_S", "WRITE_TIMEOUT_S"):
        monkeypatch.setattr(answer_journal, limit, 0.05)
    hangs = threading.Event()

    async def chat_over_a_hanging_disk(ask: Ask) -> None:
        told = "?"
        for turn in range(TURNS):
            told = await ask(told)
            if turn == 1:
                for thread in (answer_journal._reading, answer_journal._writing):
                    thread.submit(hangs.wait, 30.0)

    try:
        first = await life.play(chat_over_a_hanging_disk)
        other = await life.play(chat, attempts=(4,))
    finally:
        hangs.set()
    assert first is not None
    assert other is not None
    assert (len(first.rollouts), len(other.rollouts)) == (1, 1)
    assert caplog.text.count("event=answer_not_recorded ") == 1, "the third answer's; no later one was tried"
    assert caplog.text.count("event=answers_not_recorded group=d/1-2") == 1
    monkeypatch.undo()
    told = life.said
    again = await life.play(chat)
    assert again is not None
    assert again.rollouts[0].answers_from_journal == 2
    assert told[0] != life.said[0], "the other attempt has answers of its own"


async def open_answers(life: Life) -> list[int]:
    """How many answers each attempt of a process has that then dies at once."""
    files = await AnswerJournal(life.folder).open("d/1-2", [3])
    return [len(file.answers) for file in files.values()]


async def test_attempt_whose_answers_end_the_machine_is_sampled_anew(life: Life) -> None:
    await life.play(chat, die_at=3)
    for _ in range(MAX_PLAYS):
        assert await open_answers(life) == [3]
    ended = await life.play(chat)
    assert ended is not None
    assert ended.rollouts[0].answers_from_journal == 0
    assert len(life.server.requests) == 4 + TURNS


async def test_play_that_goes_further_or_ends_does_not_count(life: Life) -> None:
    await life.play(chat, die_at=2)
    for turn in (1, 2):  # of those that are sampled: each play records one more
        for _ in range(MAX_PLAYS - 2):
            await open_answers(life)
        await life.play(chat, die_at=1)
        assert await open_answers(life) == [2 + turn]
    for _ in range(MAX_PLAYS + 2):
        ended = await life.play(chat)
        assert ended is not None
        assert ended.rollouts[0].answers_from_journal >= 4
    assert len(life.server.requests) == 3 + 2 + 2 + 1


# ---- who forgets the answers


@pytest.mark.parametrize("reason", [reason for reason in DropReason if reason.repeats])
def test_attempt_that_failed_is_sampled_anew_unless_the_infrastructure_failed_it(reason: str) -> None:
    fails = iter([[1]])
    stage = Stage(lambda start: finished(start, failed=next(fails, []), reason=reason))
    stage.until(lambda: len(stage.records) >= 2)
    assert stage.forgotten == ([] if reason in ("transport", "verifier") else [("0-0", 1)])


def test_attempt_that_failed_twice_is_sampled_anew() -> None:
    """Its answers may be why: a judge can say nothing about one of them."""
    fails = {"0-0": iter([[1], [1]])}
    stage = Stage(
        lambda start: finished(start, failed=next(fails.get(start.group_id, iter([])), []), reason="verifier"),
        max_reissues=2,
    )
    stage.until(lambda: any(record.group_id == "0-0" for record in stage.records))
    assert stage.forgotten == [("0-0", 1)]


def test_answers_of_a_server_that_missed_its_probe_are_forgotten() -> None:
    stage = Stage(lambda start: sampled_by(start, "s", 1))
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s",), {"s": 0}
    stage.until(lambda: stage.training.holds_groups)
    stage.trainer.misses = [missed_probe("s", 1)]
    stage.until(lambda: len(stage.forgotten) >= 2)
    assert {attempt for _, attempt in stage.forgotten} == {0, 1}


def dropped(position: int) -> GroupDropped:
    place = {"group_id": f"0-{position}", "epoch": 0, "position": position, "problem_index": position, "actor": 0}
    rest = {"domain": "d", "dataset": "d", "attempts": 2, "settled_before": 0, "dispatch_index": position}
    return GroupDropped(**place, **rest, reason="timeout", detail="")


def test_journal_removes_what_is_published_also_when_it_died_in_between(tmp_path: Path) -> None:
    job = tmp_path / "actor_0"

    def files() -> list[str]:
        return sorted(path.name for path in (job / FOLDER).iterdir())

    def record(*names: str) -> None:
        for name in names:
            AttemptFile(job / FOLDER / name).append(answer_of(0))

    set_streams_backend(MemoryBackend())
    with open_writer(SingleStreamSpec(tmp_path, "actor"), ActorRecord) as groups:

        def open_journal() -> TopicJournal:
            progress = ActorProgress({"d": ProblemSource(num_problems=9, seed=0, name="d")})
            return TopicJournal(job, groups, None, progress)

        journal = open_journal()
        record("0-0.0", "0-0.1", "0-1.0", "0-1.1", "0-2.0")
        journal.publish(dropped(0))
        journal.save()
        assert files() == ["0-1.0", "0-1.1", "0-2.0"]
        journal.forget_answers("0-1", [1])
        assert files() == ["0-1.0", "0-2.0"]
        groups.write(dropped(1))
        again = open_journal()
        again.replay()
        again.save()
        assert files() == ["0-2.0"]
        again.begin(OrderResumed(step=0, order=DataOrder(), published=0))
        assert files() == []


def test_file_of_an_attempt_has_a_name_that_disks_take_whatever_the_domain_is_called(tmp_path: Path) -> None:
    """A longer name of a domain is refused (``rules.experiment.domains_are_told_apart``)."""
    journal = AnswerJournal(tmp_path)
    names = [start * (DOMAIN_NAME_BYTES // len(start.encode())) + "-123456789-123456789" for start in ("数", " ", "x")]
    files = [journal._path(name, attempt) for name in names for attempt in (7, 12345)]
    assert all(len(file.name.encode()) <= 255 for file in files)
    assert len(set(files)) == len(files)
