"""One question, one answer: what is asked, and how the verdict becomes the reward."""

import pytest
from omegaconf import OmegaConf

from pipelinerl.domains.single_turn import ask_and_judge, conversation
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import RolloutResult
from pipelinerl.testing import run_rollout

REWARDS = {"correct": 1.0, "wrong": -0.5, "no_answer": -1.0, "unparsable": -1.0, "unfinished": None}
ASKED = {"role": "user", "content": "2 + 2?"}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


@pytest.mark.parametrize(
    ("actor", "own", "messages"),
    [
        (None, None, [ASKED]),
        ({"system_prompt": None, "task_template": "{task}"}, "Be brief.", [system("Be brief."), ASKED]),
        ({"system_prompt": "Think."}, "Be brief.", [system("Think."), ASKED]),
        ({"task_template": "Q: {task} {x}\nA:"}, None, [{"role": "user", "content": "Q: 2 + 2? {x}\nA:"}]),
    ],
)
def test_conversation_takes_system_prompt_and_template_from_the_configuration(actor, own, messages):
    assert conversation(OmegaConf.create({"actor": actor} if actor else {}), "2 + 2?", own) == messages


def test_template_without_a_place_for_the_task_is_refused():
    with pytest.raises(DomainError, match=r"`actor.task_template` is 'Q:'.*{task}"):
        conversation(OmegaConf.create({"actor": {"task_template": "Q:"}}), "2 + 2?")


async def rollout(verdict: Verdict, *, asynchronous: bool = False, discount: float = 1.0) -> RolloutResult:
    async def later(output: str) -> Verdict:
        return verdict

    async def generate(cfg, llm, problem, session):
        judge = later if asynchronous else lambda output: verdict
        return await ask_and_judge(cfg, llm, problem, session, task="2 + 2?", judge=judge)

    cfg = {"rewards": REWARDS, "actor": {"discount_factor": discount}}
    return await run_rollout(generate, {"dataset": "test"}, ["four"], cfg)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_verdict_becomes_the_reward_of_text_and_metrics(asynchronous):
    result = await rollout(Verdict(status="wrong", score=0.5), asynchronous=asynchronous)
    assert result.metrics.reward == result.training_texts[0].reward == 0.25  # halfway from -0.5 to 1
    assert (result.metrics.success, result.dataset_name) == (False, "test")


async def test_discount_is_taken_per_sampled_token():
    result = await rollout(Verdict(status="correct", score=1.0), discount=0.5)
    assert result.training_texts[0].output_tokens == 5  # f o u r and the end of the turn
    assert result.metrics.reward == result.training_texts[0].reward == 0.5**5


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_judge_with_an_error_gives_no_reward(asynchronous):
    with pytest.raises(VerifierError, match="out of order"):
        await rollout(Verdict(status="error", detail="out of order"), asynchronous=asynchronous)
