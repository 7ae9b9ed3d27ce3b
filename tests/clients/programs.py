"""Which clients are run, how, and what the language model says to each: three answers, the first with parallel calls.

The programs run in an environment of their own, which `make clients` makes and ``CLIENTS_PYTHON`` may name.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.agents import RecordedAgent
from pipelinerl.agents.run import agent_environment, run_program
from pipelinerl.errors import DomainError

FOLDER = Path(__file__).parent
PYTHON = Path(os.environ.get("CLIENTS_PYTHON", FOLDER.parents[1] / ".venv-clients" / "bin" / "python"))
QUESTION = "Which is the largest of 18, 5 and 30?"
CRITIC = "You are the critic."


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


TWO = f"I try two.\n{called('submit', number=5)}{called('submit', number=18)}{called('ask_critic', input='5 or 18?')}"
THIRD = called("submit", number=30)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A client in one of its ways.

    Attributes:
        package: its name on the package index.
        command: what Python of the clients' environment runs. The question is on standard input, or for ``QUESTION``.
        imports: modules that take long to import, which a training imports once (``forks.py``).
        cancels: whether it takes ``--cancel``.
        tool: that the model calls to answer.
        answers: of the model, by how many it gave before in the same conversation.
        env: further variables.
    """

    package: str
    command: tuple[str, ...]
    imports: tuple[str, ...]
    cancels: bool = False
    tool: str = "submit"
    answers: tuple[str, ...] = (TWO, THIRD, "It is 30.")
    env: dict[str, str] = field(default_factory=dict)

    def say(self, prompt: str) -> str:
        """Returns the model's answer to a prompt of ``testing.byte_tokenizer``."""
        if CRITIC in prompt:
            return "Plausible."
        return self.answers[prompt.count("<|im_start|>assistant\n") - 1]

    def arguments(self, question: str) -> list[str]:
        return [question if part == QUESTION else part for part in self.command]

    def variables(self, home: Path) -> dict[str, str]:
        """Its environment variables besides those of the endpoint. No client may call home, nor see this one."""
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_CONFIGURED": "1"}
        return {"HOME": str(home), "XDG_CONFIG_HOME": str(home), **quiet, **self.env}


def script(name: str, package: str, *apis: str, imports: tuple[str, ...], **fields: object) -> dict[str, Program]:
    """A program of this folder with each of the APIs, streamed and not."""
    found = {}
    for api in apis:
        for stream in ((), ("--stream",)):
            command = (str(FOLDER / f"{name}.py"), "--api", api, *stream)
            found["-".join((package, api, *(("stream",) if stream else ())))] = Program(
                package=package, command=command, imports=imports, **fields
            )
    return found


MINI = Program(
    package="mini-swe-agent",
    imports=("minisweagent.run.mini", "minisweagent.models.litellm_model"),
    tool="bash",
    command=(
        *("-m", "minisweagent.run.mini", "-m", "openai/policy", "-t", QUESTION),
        *("-y", "--exit-immediately", "-l", "0", "-o", os.devnull),
    ),
    answers=(
        f"I try two.\n{called('bash', command='echo 5')}{called('bash', command='echo 18')}",
        called("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 30"),
    ),
    # Its prompt names the system that it runs on, unless these do.
    env={"MSWEA_COST_TRACKING": "ignore_errors"} | dict.fromkeys(("system", "release", "version", "machine"), "any"),
)
PROGRAMS: dict[str, Program] = {
    **script("openai_sdk", "openai", "chat", "responses", imports=("openai",), cancels=True),
    **script("anthropic_sdk", "anthropic", "messages", imports=("anthropic",), cancels=True),
    **script(
        "agents_sdk",
        "openai-agents",
        *("chat", "responses"),
        imports=("agents", "openai"),
        cancels=True,
    ),
    **script(
        "pydantic_agent",
        "pydantic-ai-slim",
        *("chat", "responses", "messages"),
        imports=("pydantic_ai", "pydantic_ai.models.anthropic", "pydantic_ai.models.openai"),
        cancels=True,
    ),
    **script("graph", "langgraph", "chat", "responses", imports=("langchain_openai", "langgraph.prebuilt")),
    **script(
        "smol",
        "smolagents",
        "chat",
        imports=("smolagents",),
        answers=(TWO, THIRD, called("final_answer", answer="30")),
    ),
    **script("lite", "litellm", "chat", "responses", "messages", imports=("litellm",)),
    "mini-swe-agent-chat": MINI,
}


async def run_behind(
    agent: RecordedAgent, url: str, command: Sequence[str], question: str, variables: Mapping[str, str]
) -> str:
    """Runs a client that knows the endpoint by another address, and returns what it printed.

    Args:
        agent: the endpoint.
        url: its address for the client, without ``/v1``.
        command: of the client.
        question: its standard input.
        variables: its environment variables.
    Raises:
        DomainError: the client ended with a non-zero status.
    """
    addresses = {"OPENAI_BASE_URL": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
    environment = agent_environment(os.environ, agent, {**variables, **addresses})
    status, out, err = await run_program(command, question, environment)
    if status:
        raise DomainError(f"{list(command)} ended with {status}: {err.decode()[-2000:]}")
    return out.decode()
