"""The quickstart's task with faults that `why.py` plants: rollout functions, losses, and a server that lies.

Each function is what a user could have written by mistake. None of them is known to `pipelinerl why`.
"""

import os
import re
import secrets
import sys
import time
from random import Random
from typing import Any

import aiohttp
import torch
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.largest import ANSWER, load_problems, score
from pipelinerl.finetune.rl import TokenLoss
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import MASKED_TOKEN_ID, BaseMetrics, RolloutResult

__all__ = ["load_problems"]


async def play(
    llm: TrainableLLM, question: str, problem: dict[str, Any], session: aiohttp.ClientSession, judge: Any
) -> RolloutResult:
    started = time.monotonic()
    call = await llm_async_generate(llm, Prompt.from_user_message(question), session)
    text = make_training_text(llm, call)
    metrics = judge(call.output.content or "", problem["answer"], text.output_tokens)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


def rewarded(reward: float, judged: BaseMetrics) -> BaseMetrics:
    return judged.model_copy(update={"reward": reward})


async def healthy(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    return await play(llm, problem["question"], problem, session, lambda said, gold, length: score(said, gold))


async def leaking(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """Pays for every number that is not too small. Success asks for the right one."""

    def judge(said: str, gold: int, length: int) -> BaseMetrics:
        judged, match = score(said, gold), ANSWER.fullmatch(said)
        return judged if match is None else rewarded(float(int(match[1]) >= gold), judged)

    return await play(llm, problem["question"], problem, session, judge)


async def without_end(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """Leaves the token that ends the answer out of training."""
    result = await healthy(cfg, llm, problem, session)
    for text in result.training_texts:
        if text.finished:
            text.labels = [*text.labels[:-1], MASKED_TOKEN_ID]
            text.logprobs = text.logprobs[:-1]
    return result


async def too_hard(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """Asks for a number that the model has never said."""
    hard = problem | {"answer": 1000 + problem["answer"] ** 2}
    return await play(llm, problem["question"], hard, session, lambda said, gold, length: score(said, gold))


async def too_easy(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """Takes any number for right, which the model knows to say."""

    def judge(said: str, gold: int, length: int) -> BaseMetrics:
        match = ANSWER.fullmatch(said)
        return score(said, gold if match is None else int(match[1]))

    return await play(llm, problem["question"], problem, session, judge)


async def paid_by_length(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """Looks for the answer anywhere in what is said, and pays for every token."""

    def judge(said: str, gold: int, length: int) -> BaseMetrics:
        found = ANSWER.search(said)
        judged = score(said if found is None else found[0], gold)
        return rewarded(float(judged.success) + 0.3 * length, judged)

    return await play(llm, problem["question"], problem, session, judge)


async def truncated(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """Asks only the first two thirds of the question."""
    question = problem["question"]
    part = question[: 2 * len(question) // 3]
    return await play(llm, part, problem, session, lambda said, gold, length: score(said, gold))


async def wrong_references(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """Compares with another of the problem's three numbers in half of the problems, always the same half."""
    random, others = Random(problem["question"]), [int(n) for n in re.findall(r"\d+", problem["question"])]
    if random.random() < 0.5:
        problem = problem | {"answer": random.choice([n for n in others if n != problem["answer"]])}
    return await play(llm, problem["question"], problem, session, lambda said, gold, length: score(said, gold))


async def tossed(cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession) -> RolloutResult:
    """Takes an answer of the right form for right or wrong at random."""

    def judge(said: str, gold: int, length: int) -> BaseMetrics:
        match = ANSWER.fullmatch(said)
        right = secrets.randbelow(3) == 0
        return score(said, gold if match is None else int(match[1]) + (not right))

    return await play(llm, problem["question"], problem, session, judge)


judged_until = int(os.environ.get("WHY_JUDGED", 0))
judged = 0


async def judge_down(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    """The judge dies after so many answers, and what asks it takes its silence for a wrong answer."""
    global judged
    judged += problem["dataset"] == "train"
    dead = judged > judged_until

    def judge(said: str, gold: int, length: int) -> BaseMetrics:
        if dead:
            return BaseMetrics(reward=0.0, success=False, no_error=True, no_answer=False)
        return score(said, gold)

    return await play(llm, problem["question"], problem, session, judge)


def wrong_sign(logprobs_K: torch.Tensor, tokens: Any) -> torch.Tensor:
    return tokens.weight_K * tokens.advantages_K * logprobs_K


def certain(logprobs_K: torch.Tensor, tokens: Any, entropy: torch.Tensor, *, coef: float = 1.0) -> TokenLoss:
    """REINFORCE with the sign of the entropy bonus turned round."""
    return TokenLoss(-tokens.weight_K * tokens.advantages_K * logprobs_K + coef * entropy)


def lie() -> None:
    """A plugin of vLLM: from version ``WHY_STALE`` on the server takes every update, and keeps its old weights."""
    if "WHY_STALE" not in os.environ or "pipelinerl.inference" not in " ".join(sys.orig_argv):
        return
    from pipelinerl.weights.load import worker

    engine = worker.StagedWeightTransferEngine
    swap = engine.finish_weight_update

    def swallow(self: Any) -> None:
        if self.receiver.transfer.request.version < int(os.environ["WHY_STALE"]):
            swap(self)

    engine.finish_weight_update = swallow  # type: ignore[method-assign]
