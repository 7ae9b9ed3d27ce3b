"""Environments of verifiers, with the library: rewards are its own, and what fails is no reward."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.actor.failures import classify
from pipelinerl.domains.libraries.verifiers import as_error, generate_rollout, load_problems
from pipelinerl.errors import DomainError, TransportError
from pipelinerl.testing import run_rollout
from tests.says import says

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "verifiers.md").read_text()
CODE = re.search(r"```python\n# sums_taskset.py\n(.*?)```", GUIDE, re.DOTALL)[1]
VARIANTS = '''

class Talk(vf.Env[vf.SingleAgentEnvConfig]):
    """Several turns: the environment speaks as the user."""

    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            first = await talk.turn()
            await talk.turn(f"You said {first.last_reply}. Sure?")
'''


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a module of the guide's code and returns the block that names it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, change: tuple[str, str] = ("", ""), **agent: Any) -> dict[str, Any]:
        code = CODE + VARIANTS
        (tmp_path / f"{name}.py").write_text(code.replace(*change) if change[0] else code)
        return {"taskset": {"id": name}} | ({"agent": agent} if agent else {})

    return write


def first_of(block: dict[str, Any]) -> dict[str, Any]:
    return load_problems(["train"], block, num_train_problems=1)[0]


async def test_reward_is_the_librarys_and_tasks_are_held_out_by_content(taskset: Any):
    block = taskset("one_turn")
    train, test = load_problems(["train"], block), load_problems(["test"], block)
    assert len(train) + len(test) == 100
    assert 0 < len(test) < 25
    problem = train[0]
    right = await run_rollout(generate_rollout, problem, [f"it is {problem['data']['answer']}"])
    assert (right.metrics.reward, right.metrics.success) == (1.0, True)
    assert right.metrics.model_dump()["reward_right"] == 1.0
    assert problem["data"]["prompt"] in right.training_texts[0].prompt_text
    wrong = await run_rollout(generate_rollout, problem, ["no idea"])
    assert (wrong.metrics.reward, wrong.metrics.success) == (0.0, False)


async def test_environment_that_speaks_as_the_user_has_several_turns(taskset: Any):
    block = taskset("talk", ('["SumsTaskset"]', '["SumsTaskset", "Talk"]'))
    problem = first_of(block)
    result = await run_rollout(generate_rollout, problem, ["0", f"it is {problem['data']['answer']}"])
    assert (result.metrics.reward, len(result.training_texts)) == (1.0, 2)
    assert "You said 0. Sure?" in result.training_texts[1].prompt_text


async def test_mistake_in_the_tasks_code_is_the_domains(taskset: Any):
    fails = "raise RuntimeError('the judge has a mistake')\n        return float("
    block = taskset("mistaken", ("return float(", fails))
    with pytest.raises(DomainError, match=says("the judge has a mistake")):
        await run_rollout(generate_rollout, first_of(block), ["1"])


async def test_policy_that_fails_is_a_failure_even_if_the_library_goes_on(taskset: Any):
    def unreachable(prompt: str) -> str:
        raise TransportError("http://127.0.0.1:9: connection refused")

    with pytest.raises(TransportError, match="connection refused"):
        await run_rollout(generate_rollout, first_of(taskset("policy_down")), unreachable)


async def test_program_that_fails_is_no_reward(taskset: Any):
    block = taskset("no_docker", runtime={"type": "docker"})
    with pytest.raises(Exception, match="verifiers recorded") as raised:
        await run_rollout(generate_rollout, first_of(block), ["1"])
    assert classify(raised.value) == "transport"


def test_each_error_of_the_library_has_a_reason():
    reasons = {
        ("ProviderError", 503, False): "transport", ("ProviderError", 400, False): "domain_error",
        ("SandboxError", None, False): "transport", ("ToolsetError", None, False): "transport",
        ("InterceptionError", None, False): "transport", ("HarnessError", None, False): "transport",
        ("TimeoutError", None, True): "timeout",
        ("TaskError", None, False): "domain_error", ("EnvError", None, False): "domain_error",
    }  # fmt: skip
    assert {key: classify(as_error(key[0], "m", *key[1:])) for key in reasons} == reasons


def test_block_that_is_not_valid_is_refused(taskset: Any):
    with pytest.raises(DomainError, match=says("max_turnz")):
        load_problems(["train"], taskset("typo", max_turnz=3))
    with pytest.raises(DomainError, match=says("no_such_taskset")):
        load_problems(["train"], {"taskset": {"id": "no-such-taskset"}})
