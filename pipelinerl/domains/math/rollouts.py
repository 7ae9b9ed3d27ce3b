"""The rollout of one problem with one answer, which the verifier service judges.

``RewardTable``, ``get_reward``, ``length_penalty`` and ``verify_answer`` are for domains written for PipelineRL. New
domains use ``pipelinerl.domains.rewards`` and ``pipelinerl.domains.verifier_client``.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

import aiohttp
from omegaconf import DictConfig
from pydantic import BaseModel, model_validator

from pipelinerl.domains.countdown.judge import judge_expression
from pipelinerl.domains.math.judge import judge as judge_math
from pipelinerl.domains.math.judge import last_boxed
from pipelinerl.domains.rewards import OUTCOMES, spelled_out
from pipelinerl.domains.single_turn import ask_and_judge
from pipelinerl.domains.verifier_client import VerifierClient, client_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.records.verdicts import Verdict, no_answer
from pipelinerl.rollouts import RolloutResult

log = logging.getLogger(__name__)

COUNTDOWN = re.compile(r"countdown-(\d+)-\[([\d, ]+)\]")
"""A reference answer of PipelineRL's countdown data: target and numbers."""


class RewardTable(BaseModel):
    """Rewards by outcome, and by whether the completion finished or was cut.

    The ``rewards`` of a configuration of this project are accepted too: ``RewardTable(**cfg.rewards)``.
    """

    wrong_answer_not_finished: float
    wrong_answer_finished: float
    no_answer_not_finished: float
    no_answer_finished: float
    unparsable_not_finished: float
    unparsable_finished: float
    correct_answer_not_finished: float
    correct_answer_finished: float
    buffer_tokens: int = 0
    """Length of the overlong penalty's ramp, in tokens. 0: no penalty."""

    @model_validator(mode="before")
    @classmethod
    def _from_rewards(cls, given: Any) -> Any:
        """Fills missing fields from `correct`, `wrong`, `no_answer`, `unparsable` and `unfinished`."""
        return spelled_out(given) if isinstance(given, Mapping) else given

    def get_reward_range(self) -> tuple[float, float]:
        """Returns the smallest and the largest reward."""
        entries = [value for name, value in self.model_dump().items() if name.endswith("finished")]
        return min(entries), max(entries)

    def log_config(self, domain: str = "") -> None:
        """Logs the table, for a domain that reports it once."""
        log.info("event=rewards domain=%s %s", domain, self.model_dump())


def get_reward(answer_status: str, finished: bool, reward_table: RewardTable) -> float:
    """Returns the reward of an outcome.

    Args:
        answer_status: correct, wrong, no_answer or unparsable.
        finished: False if the completion was cut by its token limit.
        reward_table: the rewards.
    Raises:
        ValueError: the status has no reward. A verifier error is never a reward.
    """
    if answer_status not in OUTCOMES:
        raise ValueError(f"no reward for the status {answer_status!r}")
    return getattr(reward_table, f"{OUTCOMES[answer_status]}_{'finished' if finished else 'not_finished'}")


def length_penalty(max_length: int, sequence_length: int, buffer_tokens: int) -> float:
    """Returns the overlong penalty of DAPO (arXiv 2503.14476, eq. 13).

    The penalty is 0 up to ``max_length - buffer_tokens``, then falls linearly to -1 at ``max_length``.

    Args:
        max_length: limit of the completion, in tokens.
        sequence_length: length of the completion, in tokens.
        buffer_tokens: length of the ramp, in tokens.
    """
    over = sequence_length - (max_length - buffer_tokens)
    return -over / buffer_tokens if 0 < over <= buffer_tokens else 0.0


def verify_answer(prediction: str, gold: str, strict: bool = True, max_prediction_length: int = 1000) -> str:
    r"""Judges as ``verify_answer_rpc`` does, but in this process, for tests and data preparation.

    The judge has no time limit here, so rollouts must ask a verifier instead.

    Args:
        prediction: the model's output.
        gold: the reference answer, or ``countdown-<target>-[<numbers>]``.
        strict: whether variable names and the kind of bracket matter.
        max_prediction_length: an answer with more characters is unparsable. At most 1000.

    Raises:
        ValueError: the reference cannot be read.
    """
    if _too_long(prediction, max_prediction_length):
        return "unparsable"
    verdict = _countdown_verdict(prediction, gold) or judge_math(
        prediction, gold, {"answer_format": "boxed", "strict": strict}
    )
    if verdict.status == "error":
        raise ValueError(f"cannot be judged: {verdict.detail}")
    return verdict.status


def _countdown_verdict(prediction: str, gold: str) -> Verdict | None:
    """Judges the last box of an output. Returns None if the reference is not a countdown problem."""
    asked = COUNTDOWN.fullmatch(gold.strip())
    if asked is None:
        return None
    expression = last_boxed(prediction)
    if not expression:
        return no_answer("no \\boxed{}")
    return judge_expression(expression, [int(number) for number in asked[2].split(",")], int(asked[1]))


def _too_long(prediction: str, max_prediction_length: int) -> bool:
    return len(prediction[prediction.rfind("\\boxed") :]) > max_prediction_length


@functools.lru_cache
def _client(host: str, port: int) -> VerifierClient:
    return VerifierClient([f"http://{host}:{port}"])


async def verify_answer_rpc(
    session: aiohttp.ClientSession,
    host: str,
    port: int,
    prediction: str,
    gold: str,
    strict: bool = True,
    max_prediction_length: int = 1000,
) -> str:
    r"""Asks a verifier for the status of the last ``\boxed{}``: correct, wrong, no_answer or unparsable.

    Args:
        session: HTTP session of the rollout.
        host: the verifier's host name or address.
        port: the verifier's TCP port.
        prediction: the model's output.
        gold: the reference answer.
        strict: whether variable names and the kind of bracket matter.
        max_prediction_length: an answer with more characters is unparsable. At most 1000.

    Raises:
        VerifierError: the verifier did not answer, or its judge failed.
    """
    if _too_long(prediction, max_prediction_length):
        return "unparsable"
    client = _client(host, port)
    verdict = await client.check(session, "math", prediction, gold, answer_format="boxed", strict=strict)
    return verdict.status


required_problem_keys = ("task", "answer")

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout. ``cfg.environment.answer_format`` is ``boxed`` (default) or ``any``."""
    answer_format = (cfg.get("environment") or {}).get("answer_format", "boxed")

    async def judge(output: str) -> Verdict:
        client = client_of(cfg)
        return await client.check(session, "math", output, problem["answer"], answer_format=answer_format)

    return await ask_and_judge(
        cfg, llm, problem, session, task=problem["task"], judge=judge, system_prompt=SYSTEM_PROMPT
    )
