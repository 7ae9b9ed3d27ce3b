"""The shipped agents, function and program, against a scripted model."""

import pytest

from examples.largest_agent.domain import generate_program_rollout, generate_rollout
from pipelinerl.testing import run_rollout

PROBLEM = {"question": "Which is the largest of 18, 5 and 30?", "answer": 30, "dataset": "train"}


def submitted(arguments: str) -> str:
    return f'<tool_call>{{"name": "submit", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("rollout", [generate_rollout, generate_program_rollout])
@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (submitted('{"number": 30}'), 1.0),
        (submitted('{"number": 18}'), 0.0),
        (submitted('{"number": "many"}'), -1.0),
        (submitted("[30]"), -1.0),
        (submitted("{}"), -1.0),
        ("30", -1.0),
    ],
)
async def test_agent_is_rewarded_for_what_it_submits(rollout, reply, reward):
    result = await run_rollout(rollout, PROBLEM, [reply])
    assert result.metrics.reward == result.training_texts[0].reward == reward
    assert result.metrics.success == (reward == 1.0)
    assert result.training_texts[0].output_text == reply + "<|im_end|>"
