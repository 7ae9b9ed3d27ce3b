"""What domains written for PipelineRL import from its math domain: a reward by outcome and completion, and a verdict.

The domains of this package use ``pipelinerl.domains.rewards`` and ``pipelinerl.domains.verifier_client``.
"""

import functools

import aiohttp
from pydantic import BaseModel

from pipelinerl.domains.verifier_client import VerifierClient


class RewardTable(BaseModel):
    """Rewards by outcome, and by whether the completion ended by itself."""

    wrong_answer_not_finished: float
    wrong_answer_finished: float
    no_answer_not_finished: float
    no_answer_finished: float
    unparsable_not_finished: float
    unparsable_finished: float
    correct_answer_not_finished: float
    correct_answer_finished: float
    buffer_tokens: int = 0
    """Length of the overlong penalty's ramp; 0 = no penalty."""


def get_reward(answer_status: str, finished: bool, reward_table: RewardTable) -> float:
    """The table's entry; raises ``ValueError`` for a status that has none (an error is never a reward)."""
    if answer_status not in ("wrong", "no_answer", "unparsable", "correct"):
        raise ValueError(f"no reward for the status {answer_status!r}")
    outcome = f"{answer_status}_answer" if answer_status in ("wrong", "correct") else answer_status
    return getattr(reward_table, f"{outcome}_{'finished' if finished else 'not_finished'}")


def length_penalty(max_length: int, sequence_length: int, buffer_tokens: int) -> float:
    """0 up to ``max_length - buffer_tokens``, then linear to -1 at ``max_length`` (DAPO, arXiv 2503.14476, eq. 13)."""
    over = sequence_length - (max_length - buffer_tokens)
    return -over / buffer_tokens if 0 < over <= buffer_tokens else 0.0


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
    r"""Status of the last ``\boxed{}`` of an output: correct, wrong, no_answer or unparsable.

    Args:
        strict: names of variables and the kind of bracket matter.
        max_prediction_length: a longer answer is unparsable; 1000 at most.

    Raises:
        VerifierError: the verifier did not answer or could not do its work.
    """
    if len(prediction[prediction.rfind("\\boxed") :]) > max_prediction_length:
        return "unparsable"
    client = _client(host, port)
    verdict = await client.check(session, "math", prediction, gold, answer_format="boxed", strict=strict)
    return verdict.status
