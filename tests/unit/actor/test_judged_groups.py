"""Groups that a domain's `judge_group` judges as a whole, by a scripted judge that compares their answers."""

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from omegaconf import DictConfig, OmegaConf

from benchmarks.whole_group import run_whole_group
from pipelinerl.actor.answer_journal import AnswerJournal
from pipelinerl.actor.executor import Executor, JudgeFunction, RolloutRules
from pipelinerl.actor.messages import FROM_WORKER, JUDGEMENT, Failure, GroupEnded, GroupFinished, StartGroup
from pipelinerl.actor.router import Client, RequestLimits
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.judge_client import judge_of
from pipelinerl.errors import TransportError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.records import GroupDropped, Rollout, RolloutGroup
from pipelinerl.records.drops import DropReason
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeServer, byte_tokenizer
from tests.actor_stage import Stage, finished, missed_probe, rollout
from tests.unit.domains.test_judge import Server, opinion

TOKENIZER = byte_tokenizer()
ATTEMPTS, GROUPS = 4, 60
KINDS = ("plain", "swapped", "tied", "failing", "slow")
ASKED = re.compile(
    r"Question:\n(?P<kind>\w+) (?P<group>\S+)\n.*"
    r"The first answer:\n(?P<a>=== \w+ ===)\n(?P<first>\d+)\n(?P=a)\n\n"
    r"The second answer:\n(?P<b>=== \w+ ===)\n(?P<second>\d+)\n(?P=b)\n",
    re.DOTALL,
)


class Metrics(BaseMetrics):
    answer: str


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    call = await llm_async_generate(llm, Prompt.from_user_message(problem["task"]), session)
    if problem.get("lost", lambda: False)():
        raise TransportError("the environment is gone")
    metrics = Metrics(reward=0.0, success=False, no_error=True, no_answer=False, answer=call.output.content or "")
    return RolloutResult(training_texts=[make_training_text(llm, call)], metrics=metrics, latency=0.0)


async def judge_group(
    cfg: DictConfig, problem: dict[str, Any], rollouts: list[RolloutResult], session: aiohttp.ClientSession
) -> list[float]:
    judge = judge_of(cfg, "hasty" if problem["task"].startswith("slow") else "judge")
    answers = [rollout.metrics.answer for rollout in rollouts if isinstance(rollout.metrics, Metrics)]
    return await judge.compare(session, problem["task"], answers)


class Judge(Server):
    """Says that the larger number is better. Of other kinds of groups: see ``KINDS``."""

    def __init__(self) -> None:
        super().__init__(self.judge, cancels=True)
        self.said: Counter[tuple[str, str, str]] = Counter()
        """Group, first and second answer → verdicts."""
        self.asked: Counter[str] = Counter()
        self.hold: Callable[[int], bool] = lambda number: False
        self.held = asyncio.Event()

    async def judge(self, number: int, request: dict[str, Any]) -> Any:
        found = ASKED.search(request["messages"][1]["content"])
        assert found is not None
        kind, group, first, second = found["kind"], found["group"], int(found["first"]), int(found["second"])
        self.asked[group] += 1
        if self.hold(number) or (kind == "slow" and self.asked[group] == 2):
            self.held.set()
            await asyncio.Event().wait()
        if kind == "failing" and self.asked[group] in (3, 8):
            return 500, "out of memory"
        self.said[group, found["first"], found["second"]] += 1
        better = {"swapped": 2, "tied": 1}.get(kind, 1 + (first > second) - (first < second))
        return opinion(better)


class World:
    """A policy's server, a judge, and what the executor of a worker needs. ``executor`` makes that of a new process."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, server: FakeServer, judge: Judge):
        self.folder, self.session, self.server, self.judge = folder, session, server, judge
        self.journal = AnswerJournal(folder)

    @property
    def sampled(self) -> int:
        """Completions so far."""
        return sum(request["sampling_params"].get("n", 1) for request in self.server.requests)

    def executor(self, monkeypatch: pytest.MonkeyPatch, judging: JudgeFunction = judge_group, **rules: Any) -> Executor:
        monkeypatch.setattr("pipelinerl.domains.judge_client._clients", {})
        monkeypatch.setattr("pipelinerl.domains.judge_client._resolved", (None, {}))
        judges = [
            {"name": "judge", "model_path": "m", "url": self.judge.url},
            {"name": "hasty", "model_path": "m", "url": self.judge.url, "timeout_s": 0.2},
        ]
        cfg = OmegaConf.create({"judges": judges, "launcher": {"startup_timeout_s": 0.01}})
        llm = TrainableLLM(
            model_name="policy", tokenizer=TOKENIZER, parameters={"max_tokens": 8}, collect_logprobs=True
        )
        client = Client(self.session, RequestLimits(timeout_s=60.0, max_retries=0, max_completions=ATTEMPTS))
        made = Executor(
            *(cfg, [generate_rollout], (llm, llm), client),
            RolloutRules(**{"timeout_s": 60.0, "seq_length": 1000} | rules),
            self.journal,
            judges={0: judging},
        )
        made.servers.update({"s": self.server.url}, {"s": 0})
        return made


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[World]:
    rng = random.Random(0)  # of 12 numbers, so that some answers of a group are equal
    async with (
        FakeServer(lambda *_: [*TOKENIZER.encode(str(rng.randrange(12))), TOKENIZER.eos_token_id]) as server,
        Judge() as judge,
        aiohttp.ClientSession() as session,
    ):
        yield World(folder, session, server, judge)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as running:
        yield running


def start_of(task: str, **problem: Any) -> StartGroup:
    return StartGroup(
        group_id=task.split()[-1],
        domain=0,
        problem={"task": task, **problem},
        attempts=tuple(range(ATTEMPTS)),
        evaluation=False,
        version=0,
    )


def answers_of(rollouts: tuple[Rollout, ...]) -> list[int]:
    texts = [TOKENIZER.decode(r.sequences[0].token_ids[slice(*r.sequences[0].spans[0, :2])]) for r in rollouts]
    return [int(text.removesuffix("<|im_end|>")) for text in texts]


def expected(kind: str, answers: list[int]) -> list[float]:
    """The share of the others that are smaller, equal ones as half."""
    if kind in ("swapped", "tied"):
        return [0.5] * len(answers)
    return [(sum(np.sign(one - other) + 1 for other in answers) - 1) / 2 / (len(answers) - 1) for one in answers]


def test_sixty_groups_are_compared_once_and_no_failure_of_the_judge_samples_again(
    runner: asyncio.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A judge that names the first in either order, one that finds all equal, fails twice, or is late once a group."""
    world_of = opened(tmp_path)
    world = runner.run(world_of.__aenter__())
    executor = world.executor(monkeypatch)
    kinds: dict[str, str] = {}

    def answer(start: StartGroup) -> GroupFinished:
        kind = kinds.setdefault(start.group_id, KINDS[len(kinds) % len(KINDS)])
        problem = {"task": f"{kind} {start.group_id}"}
        return runner.run(run_whole_group(executor, msgspec.structs.replace(start, problem=problem)))

    try:
        stage = Stage(answer, batch=GROUPS * ATTEMPTS, attempts=ATTEMPTS, max_reissues=30)
        stage.forget_answers = world.journal.remove  # type: ignore[method-assign]
        stage.until(lambda: len(stage.records) == GROUPS)
    finally:
        runner.run(world_of.__aexit__(None, None, None))

    assert len({record.group_id for record in stage.records}) == len(kinds) == GROUPS
    for record in stage.records:
        assert isinstance(record, RolloutGroup)
        answers = answers_of(record.rollouts)
        rewards = [rollout.reward for rollout in record.rollouts]
        assert rewards == pytest.approx(expected(kinds[record.group_id], answers)), kinds[record.group_id]
        assert [rollout.metrics["reward"] for rollout in record.rollouts] == rewards
        distinct = set(answers)
        pairs = {(record.group_id, str(a), str(b)) for a in distinct for b in distinct if a != b}
        said = {pair: world.judge.said[pair] for pair in pairs}
        assert min(said.values(), default=1) == 1
        if kinds[record.group_id] in ("plain", "swapped", "tied"):  # of the others, a verdict may come too late
            assert said == dict.fromkeys(pairs, 1)
    assert world.sampled == GROUPS * ATTEMPTS
    repeated = {group_id for group_id, kind in kinds.items() if kind in ("failing", "slow")}
    assert stage.loop._metrics.snapshot(1.0)["failures/verifier"] >= len(repeated)


@pytest.mark.parametrize("kind", ["plain", "tied"])
async def test_group_that_was_judged_before_a_crash_is_not_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One process dies while it judges, the next one when it has judged: then its outcome is lost, but not its work."""
    async with opened(tmp_path) as world, asyncio.timeout(60):
        start = start_of(f"{kind} g")
        world.judge.hold = lambda number: number == 2
        dying = asyncio.ensure_future(run_whole_group(world.executor(monkeypatch), start))
        await world.judge.held.wait()
        dying.cancel()
        await asyncio.wait([dying])
        lost = await run_whole_group(world.executor(monkeypatch), start)
        judged = len(world.judge.requests)
        again = await run_whole_group(world.executor(monkeypatch), start)
        assert (len(world.judge.requests), world.sampled) == (judged, ATTEMPTS)
        assert [r.reward for r in again.rollouts] == [r.reward for r in lost.rollouts]
        assert [r.reward for r in again.rollouts] == pytest.approx(expected(kind, answers_of(again.rollouts)))

        world.journal.remove("g", [0])  # it is sampled again, so that others are compared
        changed = await run_whole_group(world.executor(monkeypatch), start)
        assert [r.reward for r in changed.rollouts] == pytest.approx(expected(kind, answers_of(changed.rollouts)))
        world.journal.resolve("g", range(ATTEMPTS))
        world.journal.flush()
        assert list((tmp_path / "answers").iterdir()) == []


async def test_lost_attempt_has_the_others_wait_for_it_and_evaluations_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = iter([True])
    async with opened(tmp_path) as world:
        start = start_of("plain g", lost=lambda: next(lost, False))
        ended = await run_whole_group(world.executor(monkeypatch), start)
        assert (ended.rollouts, [f.reason for f in ended.failures], ended.judged) == ((), ["transport"], True)
        assert len(world.judge.requests) == 0
        whole = await run_whole_group(world.executor(monkeypatch), start)
        assert (len(whole.rollouts), world.sampled) == (ATTEMPTS, ATTEMPTS), "all got their answers again"

        lost = iter([True])
        start = start_of("plain h", lost=lambda: next(lost, False))
        ended = await run_whole_group(world.executor(monkeypatch, max_failed=1), start)
        assert [r.reward for r in ended.rollouts] == pytest.approx(expected("plain", answers_of(ended.rollouts)))
        assert (len(ended.rollouts), len(ended.failures)) == (ATTEMPTS - 1, 1)

        asked = len(world.judge.requests)
        test = msgspec.structs.replace(start_of("plain t"), evaluation=True)
        ended = await run_whole_group(world.executor(monkeypatch), test)
        assert ([r.reward for r in ended.rollouts], ended.judged) == ([0.0] * ATTEMPTS, False)
        assert len(world.judge.requests) == asked


async def test_wrong_rewards_are_an_error_of_the_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as world:
        for given, fact in (
            ([1.0], "1 rewards for 4 rollouts"),
            ([0.0, 1.0, float("nan"), 0.0], "reward of rollout 2 is nan"),
            (None, "'NoneType' object is not iterable"),
        ):

            async def judging(*_: Any, given: Any = given) -> Any:
                return given

            ended = await run_whole_group(world.executor(monkeypatch, judging), start_of("plain g"))
            (failure,) = ended.failures
            assert (ended.rollouts, failure.attempt, failure.reason) == ((), JUDGEMENT, DropReason.DOMAIN_ERROR)
            assert fact in failure.detail


async def test_late_judgement_fails_like_a_late_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def judging(*_: Any) -> Any:
        await asyncio.Event().wait()

    async with opened(tmp_path) as world:
        executor = world.executor(monkeypatch)
        start = start_of("plain g")
        await run_whole_group(executor, start)  # its answers are recorded, so that the limit is the judgement's
        world.journal.remove("g", [JUDGEMENT])
        late = world.executor(monkeypatch, judging, timeout_s=2.0)
        (failure,) = (await run_whole_group(late, start)).failures
    assert (failure.attempt, failure.reason) == (JUDGEMENT, DropReason.TIMEOUT)
    assert "actor.rollout_timeout_s=2.0" in failure.detail


def test_judgement_reaches_the_actor_by_attempt() -> None:
    failure = Failure(attempt=JUDGEMENT, reason=DropReason.VERIFIER, detail="d")
    rollouts = [rollout(2, 0), rollout(0, 0)]
    for ended, rewards, failures in (
        (GroupEnded(task_id=1), [1.0, 1.0], ()),
        (GroupEnded(task_id=1, rewards={0: 0.25, 2: 0.75}), [0.75, 0.25], ()),
        (GroupEnded(task_id=1, rewards={}, failure=failure), [], (failure,)),
    ):
        message = FROM_WORKER.decode(FROM_WORKER.encode(ended))
        assert isinstance(message, GroupEnded)
        found = GroupFinished.of(message, rollouts, [])
        assert [one.reward for one in found.rollouts] == rewards
        assert [one.metrics for one in found.rollouts] == [{"success": 1.0, "reward": reward} for reward in rewards]
        assert (found.failures, found.judged) == (failures, ended.rewards is not None)


def test_whole_group_is_played_again_and_only_the_failed_attempt_forgets_its_answers() -> None:
    """First an attempt is late, then the judge fails, and then fails for good."""
    plays = iter([True, False, False])

    def answer(start: StartGroup) -> GroupFinished:
        ended = finished(start, failed=[1], reason="timeout") if next(plays) else finished(start)
        unjudged = Failure(attempt=JUDGEMENT, reason=DropReason.VERIFIER, detail="d")
        failures = ended.failures or (unjudged,)
        return GroupFinished(task_id=start.task_id, rollouts=(), failures=failures, judged=True)

    stage = Stage(answer, batch=2, max_reissues=2)
    stage.until(lambda: len(stage.records) == 1)
    (dropped,) = stage.records
    assert isinstance(dropped, GroupDropped)
    assert dropped.reason == "verifier"
    assert [start.attempts for start in stage.workers.started] == [(0, 1)] * 3
    assert [attempt for _, attempt in stage.forgotten if attempt != JUDGEMENT] == [1]


def test_judged_group_of_which_a_server_missed_its_probe_is_made_again_as_a_whole() -> None:
    """One of its two rollouts is refused. The other one's reward compares it with what nobody should have sampled."""

    def judged_by(start: StartGroup, *servers: str) -> GroupFinished:
        rollouts = tuple(rollout(i, 1, servers={servers[i]: 0}) for i in start.attempts)
        return GroupFinished(task_id=start.task_id, rollouts=rollouts, failures=(), judged=True)

    stage = Stage(lambda start: judged_by(start, "s", "t"), batch=2)
    stage.trainer.version, stage.trainer.servers, stage.trainer.verified = 1, ("s", "t"), {"s": 0, "t": 1}
    stage.until(lambda: stage.training.holds_groups)
    stage.workers.answer = lambda start: judged_by(start, "t", "t")
    stage.trainer.misses, stage.trainer.servers, stage.trainer.verified = [missed_probe("s", 1)], ("t",), {"t": 1}
    stage.until(lambda: len(stage.records) >= 1)
    first = [start.attempts for start in stage.workers.started if start.group_id == stage.records[0].group_id]
    assert first == [(0, 1)] * 2
    assert {attempt for _, attempt in stage.forgotten} == {0}
