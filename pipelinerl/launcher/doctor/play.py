"""Plays a domain with a scripted model and its real judges. All I/O of the doctor."""

import asyncio
import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any

import aiohttp
import msgspec
import uvicorn
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.reward_functions import verifier_of
from pipelinerl.config.sections import Config
from pipelinerl.domains.contract import describe_error
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.launcher.doctor.findings import Observation, Seen, answers_differ
from pipelinerl.launcher.doctor.policies import (
    EMPTY,
    Answering,
    Player,
    Say,
    candidates,
    hidden_fields,
    players,
)
from pipelinerl.launcher.domain_check import needs_outside
from pipelinerl.rollouts import RewardMode, RolloutResult, check_result
from pipelinerl.testing import FakeLLM, byte_tokenizer
from pipelinerl.world.map import Job
from pipelinerl.world.proxies import open_session

BYTES_PER_TOKEN = 8
"""A token of the scripted model is one byte, one of the policy has up to about eight."""
FEWEST = 8
"""The fewest problems of which a player may miss one and surely beat a coin: 7 of 8 have a lower bound of 0.53."""
PLAYS_PER_PROBLEM = 30
"""Every player plays a problem twice, and a few problems are played in every format."""
TRIED = 6
"""Problems on which every way to answer is tried."""
LONGEST = 4000
"""Characters of the longest answer: far more than a plain one, to find judges that pay for length or slow down."""
MOST_TRAIN, MOST_TEST = 1000, 400
"""Problems whose prompts are compared."""
STARTUP_S = 60.0
"""The verifier's workers import the judges' libraries first, which takes a loaded machine some seconds."""
ROLLOUT_TIMEOUT_S = 30.0
"""A scripted player answers at once, so this is the time of the domain's judges."""


@contextlib.contextmanager
def verifier(cfg: Config) -> Iterator[list[dict[str, Any]]]:
    """Runs a verifier on a free loopback port, if the run has one. Yields its entries of `cfg.jobs`."""
    if not cfg.world.verifier_replicas:
        yield []
        return
    app = create_app(verifier_of(cfg))
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listener],), name="verifier", daemon=True)
    thread.start()
    try:
        deadline = time.monotonic() + STARTUP_S
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise DomainError(f"the verifier did not start within {STARTUP_S:g} s")
            time.sleep(0.02)
        port = listener.getsockname()[1]
        job = msgspec.to_builtins(
            Job(name="verifier_0", kind="verifier", port=port, url=f"http://127.0.0.1:{port}", hostname="127.0.0.1")
        )
        yield [job, {**job, "kind": "environment"}]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class Stage:
    """A domain, ready to be played.

    Args:
        cfg: the configuration as the domain gets it.
        parallel: rollouts at a time.
        seed: for the players' random answers.
    """

    def __init__(self, cfg: DictConfig, rollout: Callable[..., Awaitable[Any]], *, parallel: int, seed: int):
        self._cfg, self._rollout, self.seed = cfg, rollout, seed
        self._parallel = parallel
        self._tokenizer = byte_tokenizer()
        self._parameters: dict[str, Any] = dict(OmegaConf.to_container(cfg.llm.parameters))  # type: ignore[arg-type]
        if limit := self._parameters.get("max_tokens"):
            self._parameters["max_tokens"] = limit * BYTES_PER_TOKEN
        self._rewards: RewardMode = OmegaConf.select(cfg, "actor.rewards") or "rollout"

    async def play(self, plays: Sequence[tuple[Player, int, dict[str, Any]]]) -> list[Observation]:
        """Plays (player, index of the problem, problem), and returns one observation for each, in their order."""
        places = asyncio.Semaphore(self._parallel)
        timeout = aiohttp.ClientTimeout(total=ROLLOUT_TIMEOUT_S)

        async def one(player: Player, index: int, problem: dict[str, Any]) -> Observation:
            async with places:
                return await self._one(player, index, problem, session)

        async with open_session(timeout=timeout) as session:
            return await asyncio.gather(*(one(*play) for play in plays))

    async def _one(
        self, player: Player, index: int, problem: dict[str, Any], session: aiohttp.ClientSession
    ) -> Observation:
        random = Random(f"{self.seed}/{player.name}/{index}")
        prompts: list[str] = []

        def reply(prompt: str) -> str:
            prompts.append(prompt)
            return player.say(index, prompt, random)

        llm = FakeLLM.saying(reply, tokenizer=self._tokenizer, parameters=self._parameters)
        started = time.monotonic()
        try:
            result = await asyncio.wait_for(self._rollout(self._cfg, llm, dict(problem), session), ROLLOUT_TIMEOUT_S)
            checked = check_result(result, self._rewards)
        except Exception as error:  # noqa: BLE001 — the user's function
            return Observation(
                player=player.name,
                problem=index,
                prompt=prompts[0] if prompts else "",
                calls=len(prompts),
                seconds=time.monotonic() - started,
                error=describe_error(error),
                from_outside=needs_outside(error),
            )
        return observed(player, index, prompts, checked, time.monotonic() - started)


def observed(player: Player, index: int, prompts: Sequence[str], result: RolloutResult, seconds: float) -> Observation:
    return Observation(
        player=player.name,
        problem=index,
        prompt=prompts[0] if prompts else "",
        reward=float(result.metrics.reward),
        success=bool(result.metrics.success),
        calls=len(prompts),
        tokens=sum(text.output_tokens for text in result.training_texts),
        seconds=seconds,
    )


def drawn(problems: Sequence[dict[str, Any]], count: int, seed: int) -> list[dict[str, Any]]:
    """At most ``count`` problems, drawn at random: neighbours in a generated list are alike."""
    return Random(seed).sample(list(problems), min(count, len(problems)))


def affordable(count: int, rollout_s: float, budget_s: float) -> int:
    """Problems that every player can play within ``budget_s``, at most ``count`` and at least ``FEWEST``."""
    return min(count, max(FEWEST, int(budget_s / (PLAYS_PER_PROBLEM * max(rollout_s, 1e-6)))))


async def examine(
    stage: Stage, train: Sequence[dict[str, Any]], test: Sequence[dict[str, Any]], count: int, budget_s: float
) -> Seen:
    """Lets every player play some training problems, and reads the prompts of both sets.

    Args:
        count: training problems to play.
        budget_s: seconds for it. A slow domain plays fewer problems.
    """
    problems = drawn(train, count, stage.seed)
    silent = Player(EMPTY, lambda index, prompt, random: "")
    started = time.monotonic()
    first = await stage.play(parts([silent], problems))
    count = affordable(count, (time.monotonic() - started) / len(problems), budget_s)
    problems, first = problems[:count], first[:count]
    prompts = [observation.prompt for observation in first]
    answering = await found_answering(stage, problems, prompts)
    cast = players(problems, answering, LONGEST)
    rollouts = await stage.play(parts(cast, problems))
    if answering is not None and answers_differ(rollouts) is None:
        answering, cast = None, players(problems, None, LONGEST)
        rollouts = [rollout for rollout in rollouts if rollout.player in {player.name for player in cast}]
    again = await stage.play(parts(cast, problems)[::-1])  # in another order, because a judge may remember
    plays = {(rollout.player, rollout.problem): rollout for rollout in again}
    broken = Player("outage", lambda index, prompt, random: fail())
    return Seen(
        rollouts=rollouts,
        repeats=[(rollout, plays[rollout.player, rollout.problem]) for rollout in rollouts],
        outages=await stage.play(parts([broken], problems[:TRIED])),
        train_prompts=await first_prompts(stage, drawn(train, MOST_TRAIN, stage.seed)),
        test_prompts=await first_prompts(stage, drawn(test, MOST_TEST, stage.seed)),
        answers={i: str(problem[answering.field]) for i, problem in enumerate(problems)} if answering else None,
        hidden=hidden_fields(problems, prompts),
    )


def parts(cast: Sequence[Player], problems: Sequence[dict[str, Any]]) -> list[tuple[Player, int, dict[str, Any]]]:
    return [(player, index, problem) for player in cast for index, problem in enumerate(problems)]


def fail() -> str:
    raise TransportError("the doctor's server is down")


async def first_prompts(stage: Stage, problems: Sequence[dict[str, Any]]) -> list[str]:
    """The prompts of the first requests. The server fails at once, so that the rollout ends there."""
    broken = Player("prompts", lambda index, prompt, random: fail())
    return [observation.prompt for observation in await stage.play(parts([broken], problems)) if observation.prompt]


async def found_answering(stage: Stage, problems: Sequence[dict[str, Any]], prompts: Sequence[str]) -> Answering | None:
    """The value and format with the largest difference in success between the problem's own and the next one's value.

    If there is no difference, the one that succeeds most often. None if none succeeds.
    """
    options = candidates(problems, prompts)
    some = range(min(TRIED, len(problems)))
    plays = [
        (Player(f"{number} {shift}", saying(option, problems, shift)), index, problems[index])
        for number, option in enumerate(options)
        for shift in (0, 1)
        for index in some
    ]
    solved = Counter(rollout.player for rollout in await stage.play(plays) if rollout.success)

    def merit(number: int) -> tuple[int, int]:
        own, other = solved[f"{number} 0"], solved[f"{number} 1"]
        return abs(own - other), own

    best = max(range(len(options)), key=merit, default=None)
    return None if best is None or merit(best) == (0, 0) else options[best]


def saying(option: Answering, problems: Sequence[dict[str, Any]], shift: int) -> Say:
    return lambda index, prompt, random: option.of(problems[(index + shift) % len(problems)])
