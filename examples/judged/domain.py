"""Questions whose answers no program can judge: the judges of the configuration do (docs/guides/judge.md).

Each judge's score is a metric of its name, which `finetune.rl.reward_weights` may name as a reward.
"""

import time
from typing import Any

import aiohttp
from omegaconf import DictConfig, OmegaConf
from pydantic import ConfigDict

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.chat.continuation import spoken
from pipelinerl.domains.columns import ANSWERS, answer_of, checked_columns, found_column, question_of
from pipelinerl.domains.datasets import Problem, rows_of
from pipelinerl.domains.judge_client import all_of, judge_of
from pipelinerl.domains.rows import MAX_LEFT_OUT, is_unusable, load_usable
from pipelinerl.domains.single_turn import conversation
from pipelinerl.errors import DomainError
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

required_problem_keys = ("task",)


class JudgedMetrics(BaseMetrics):
    """With a score for every judge, by its name."""

    model_config = ConfigDict(extra="allow")


def load_problems(
    dataset_names: list[str],
    columns: dict[str, str] | None = None,
    judges: list[str] | None = None,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Loads problems ``{"dataset", "task", "answer", "judges"}``.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``.
        columns: field → column. ``answer`` is what the judges get as reference. Without such a column there is none.
        judges: names of the judges of these problems. None: all of the configuration.
        max_left_out: largest share of a data set's rows that may lack a question. They are left out.
    """
    given = checked_columns(columns, ("task", "answer"))

    def read(row: dict[str, Any], _: int) -> Problem:
        found = found_column(row, given.get("answer"), ANSWERS)
        has_answer = "answer" in given if found is None else not is_unusable(found[1])
        answer = answer_of(row, given.get("answer")) if has_answer else ""
        return {"task": question_of(row, given.get("task")), "answer": answer} | ({"judges": judges} if judges else {})

    return [
        {"dataset": name} | problem
        for name in dataset_names
        for problem in load_usable(name, rows_of(name, True), read, max_left_out=max_left_out)
    ]


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Samples one answer and awaits the verdict of every judge. The reward is the weighted sum of their scores.

    The judges read the answer without the thought before it. `success`: every judge that says scores said its best.

    A judge that `finetune.rl.reward_weights` does not name has no weight there. If it is empty, all have the weight 1.
    """
    names = [str(name) for name in problem.get("judges") or [judge["name"] for judge in cfg.get("judges") or ()]]
    if not names:
        raise DomainError("`judges` is empty: the domain `judged` needs at least one")
    clients = [judge_of(cfg, name) for name in names]
    started = time.monotonic()
    call = await llm_async_generate(llm, Prompt(messages=conversation(cfg, problem["task"])), session)
    answer = spoken(call.output.content or "")
    verdicts = await all_of(
        client.check(session, problem["task"], answer, problem.get("answer") or "") for client in clients
    )
    weights = OmegaConf.select(cfg, "finetune.rl.reward_weights") or dict.fromkeys(names, 1.0)
    said = [verdict for client, verdict in zip(clients, verdicts, strict=True) if client.kind == "chat"]
    scores = {name: verdict.score for name, verdict in zip(names, verdicts, strict=True)}
    metrics = JudgedMetrics(
        reward=sum(float(weights.get(name, 0.0)) * score for name, score in scores.items()),
        success=bool(said) and all(verdict.status == "correct" for verdict in said),
        no_error=True,
        no_answer=not answer.strip(),
        **scores,
    )
    text = make_training_text(llm, call)
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )
