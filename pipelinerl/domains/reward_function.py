"""The domain of `reward_function`: one question, one answer, rewarded by functions of the user's.

What computes (`def`) runs in the verifier, where it has limits and blocks no rollout. What waits (`async def`) runs in
the rollout worker. A failure of a function is an exception, never a reward.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict

from pipelinerl.async_llm import backoff_s, llm_async_generate, make_training_text, may_succeed
from pipelinerl.chat.continuation import spoken
from pipelinerl.config.reward_functions import MATH, REWARD, is_judge, name_of, weights_of
from pipelinerl.domains.columns import ANSWERS, checked_columns, column, found_column, question_of
from pipelinerl.domains.contract import describe_error, import_named, is_async
from pipelinerl.domains.datasets import Problem, rows_of
from pipelinerl.domains.judge_client import FIRST_DELAY_S, all_of, judge_of
from pipelinerl.domains.reward_forms import Answered, Form, arguments, form_of, numbers_of
from pipelinerl.domains.rows import MAX_LEFT_OUT, UnusableRow, load_usable
from pipelinerl.domains.single_turn import conversation
from pipelinerl.domains.verifier_client import client_of
from pipelinerl.errors import DomainError, RecordError, VerifierError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import BaseMetrics, RolloutResult

GROUND_TRUTHS = ("reward_model.ground_truth", "ground_truth", *ANSWERS)
"""Usual columns of what an answer is compared with."""
DEFAULT_TIMEOUT_S = 120.0
"""Used where the configuration has no `reward_function_timeout_s`, as in a test."""

MAY_PASS = {
    *("builtins.ConnectionError", "builtins.TimeoutError", "aiohttp.ClientError", "httpx.TransportError"),
    *("requests.ConnectionError", "requests.Timeout", "openai.APIConnectionError", "anthropic.APIConnectionError"),
    "pipelinerl.TransportError",
}
"""Errors without a status, by package and class, after which an async function is called again."""

required_problem_keys = ("task",)


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    max_problems: int | None = None,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Loads problems ``{"dataset", "task", "answer", "columns"}``. ``columns`` is the whole row.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``.
        columns: field → column, for ``task`` and ``ground_truth``.
        max_problems: maximum number of rows to read per data set. None: all.
        max_left_out: largest share of a data set's rows that may lack a question. They are left out.
    """
    named = checked_columns(columns, ("task", "ground_truth"))

    def read(given: dict[str, Any], _: int) -> Problem:
        try:
            row = msgspec.to_builtins(given)  # dates and decimals become texts
        except TypeError as error:
            raise UnusableRow("a value that is no plain data", str(error)) from error
        truth = named.get("ground_truth")
        found = column(row, truth, (), "ground_truth") if truth else found_column(row, None, GROUND_TRUTHS)
        return {"task": question_of(row, named.get("task")), "answer": found and found[1], "columns": row}

    return [
        {"dataset": name} | problem
        for name in dataset_names
        for problem in load_usable(name, rows_of(name, True), read, max_rows=max_problems, max_left_out=max_left_out)
    ]


class RewardMetrics(BaseMetrics):
    """With a score for every function, by its name, and the seconds until all had answered."""

    model_config = ConfigDict(extra="allow")


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Samples one answer and rewards it with the weighted sum of the scores.

    Raises:
        DomainError: a function fits no form, raised, or returned something else; or none applies to the problem.
        VerifierError: a function exceeded a limit, or the verifier did not answer.
    """
    weights = weights_of(cfg.reward_function)
    started = time.monotonic()
    call = await llm_async_generate(llm, Prompt(messages=conversation(cfg, problem["task"])), session)
    text = make_training_text(llm, call)
    answered = Answered(
        task=problem["task"],
        output=call.output.content or "",
        completion_ids=text.call_tokens.completion_ids.tolist() if text.call_tokens is not None else [],
        columns=problem.get("columns", problem),  # of another loader
        ground_truth=problem.get("answer"),
        dataset=problem.get("dataset", ""),
    )
    sampled = time.monotonic()
    said = await all_of(asked(cfg, dotted, answered, session) for dotted in weights)
    found = dict(zip(weights, said, strict=True))
    text.reward, shown = rewarded(found, weights, OmegaConf.select(cfg, "finetune.rl.reward_weights") or {})
    metrics: dict[str, Any] = shown | {
        "reward": text.reward,
        "success": next(numbers for numbers in said if numbers)["score"] > 0,
        "no_error": True,
        "no_answer": not answered.output.strip(),
        "reward_s": time.monotonic() - sampled,
    }
    return RolloutResult(
        training_texts=[text],
        metrics=RewardMetrics(**metrics),
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


def rewarded(
    found: Mapping[str, Mapping[str, float]], weights: Mapping[str, float], named: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Returns the reward, and the metrics of the functions.

    Args:
        found: dotted name → what the function said (`numbers_of`).
        weights: dotted name → weight.
        named: `finetune.rl.reward_weights`, which replace ``weights``.
    Raises:
        DomainError: no function applies.
    """
    scores = {name_of(dotted): said["score"] for dotted, said in found.items() if said}
    if not scores:
        raise DomainError(f"no reward function applies to this problem: {list(found)} returned None")
    own = named or {name_of(dotted): weight for dotted, weight in weights.items()}
    others = {
        f"{name_of(dotted)}_{name}": value
        for dotted, said in found.items()
        for name, value in said.items()
        if name != "score"
    }
    # One that is compared on its own needs a value. All attempts at the problem get the same.
    unsaid = {name_of(dotted): 0.0 for dotted in found if name_of(dotted) in named}
    return sum(own.get(name, 0.0) * score for name, score in scores.items()), unsaid | scores | others


async def asked(cfg: DictConfig, dotted: str, answered: Answered, session: aiohttp.ClientSession) -> dict[str, float]:
    """Returns what one function or judge says of the answer. Raises as ``generate_rollout`` does."""
    if is_judge(dotted):
        return {"score": (await judged_by(cfg, dotted, answered, session)).score}
    function, form = known(dotted, cfg.get("reward_function_kind") or "auto")
    given = arguments(dotted, function, form, answered)
    if is_async(function):
        try:
            return numbers_of(form, await awaited(cfg, dotted, function, given))
        except (DomainError, RecordError) as error:
            raise DomainError(f"`reward_function` is {dotted}: {error}") from error
    verdict = await client_of(cfg).check(session, REWARD + dotted, "", form, arguments=given)
    if verdict.status == "correct":
        return verdict.numbers or {}
    if verdict.status == "wrong":
        raise DomainError(f"`reward_function` is {dotted}: {verdict.detail}")
    raise VerifierError(f"{dotted}: {verdict.detail} (`verifier.timeout_s`, `memory_mb`, `max_body_kb`)")


async def awaited(cfg: DictConfig, dotted: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Calls an async function, and again after an error that may pass, until `reward_function_timeout_s` are over.

    Raises:
        VerifierError: the time is over.
        DomainError: `reward_function_max_calls` are used up.
    """
    limit_s = float(cfg.get("reward_function_timeout_s") or DEFAULT_TIMEOUT_S)
    last = ""
    try:
        async with asyncio.timeout(limit_s) as limit:
            for repetition in itertools.count():
                count_call(dotted, cfg.get("reward_function_max_calls"))
                try:
                    return await function(**given)
                except Exception as error:
                    if limit.expired() or not may_pass(error):
                        raise
                    last = f", and raised {describe_error(error)} before"
                await asyncio.sleep(backoff_s(repetition, FIRST_DELAY_S))
    except Exception as error:
        if not limit.expired():
            raise
        raise VerifierError(
            f"{dotted} took longer than {limit_s:g} s{last}: raise `reward_function_timeout_s`"
        ) from error


_num_calls: Counter[str] = Counter()
"""Calls of async functions in this process, by name."""


def count_call(dotted: str, most: int | None) -> None:
    """Counts a call before it is made. Raises ``DomainError`` after ``most`` of them."""
    if most is not None and _num_calls[dotted] >= most:
        raise DomainError(f"this worker has called it {most} times, the limit of `reward_function_max_calls`")
    _num_calls[dotted] += 1


def may_pass(error: BaseException) -> bool:
    """Whether an error is of a network service that a repetition may find well: by its status, else by its class."""
    for of in (error, getattr(error, "response", None)):
        status = getattr(of, "status_code", None) or getattr(of, "status", None)
        if isinstance(status, int) and status:
            return may_succeed(status)
    names = {f"{one.__module__.partition('.')[0]}.{one.__name__}" for one in type(error).__mro__}
    return not names.isdisjoint(MAY_PASS)


async def judged_by(cfg: DictConfig, name: str, answered: Answered, session: aiohttp.ClientSession) -> Verdict:
    """Returns the verdict of the verifier's judge of mathematics, or of one of `judges`."""
    if name == MATH:
        answer_format = (cfg.get("environment") or {}).get("answer_format", "boxed")
        client = client_of(cfg)
        return await client.check(session, MATH, answered.output, answered.ground_truth, answer_format=answer_format)
    reference = answered.ground_truth if isinstance(answered.ground_truth, str) else ""
    return await judge_of(cfg, name).check(session, answered.task, spoken(answered.output), reference)


@lru_cache
def known(dotted: str, kind: str) -> tuple[Callable[..., Any], Form]:
    """Imports a function, and returns it with its form."""
    function = import_named("reward_function", dotted)
    return function, form_of(dotted, function, kind)
