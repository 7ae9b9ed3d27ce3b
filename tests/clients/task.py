"""What every client of this folder is asked, and its tools: the question on standard input, submitted numbers on
output.

The second tool asks a sub-agent, a conversation of its own at the same endpoint. A program is run by path in an
environment of its own and imports nothing of PipelineRL. It finds the endpoint in the variables of OpenAI or Anthropic.
"""

import argparse
import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Callable

MAX_ANSWERS = 4
"""After so many answers of the model the agent gives up."""
CANCELLED_AFTER_S = 1.0

_parser = argparse.ArgumentParser()
_parser.add_argument("--api", default="chat", choices=("chat", "responses", "messages"))
_parser.add_argument("--stream", action="store_true")
_parser.add_argument("--cancel", action="store_true", help="begin, cancel that, and begin anew")
OPTIONS = _parser.parse_args()
QUESTION = sys.stdin.read()
LARGEST = max(map(int, re.findall(r"\d+", QUESTION)))

SYSTEM = "Use your tools."
CRITIC = "You are the critic."
"""The sub-agent's instructions."""
SCHEMAS = {
    "submit": ("Hand in the answer.", {"number": {"type": "integer"}}),
    "ask_critic": ("Ask whether an answer is plausible.", {"input": {"type": "string"}}),
}
"""Of the tools, for clients that take them as JSON: description and properties."""


def submit(number: int) -> str:
    """Hand in the answer.

    Args:
        number: the answer.
    """
    sys.stdout.write(f"{number}\n")
    return "right" if number == LARGEST else "too small"


def schema_of(name: str) -> dict:
    """Returns the JSON schema of a tool's arguments."""
    properties = SCHEMAS[name][1]
    return {"type": "object", "properties": properties, "required": list(properties)}


def functions() -> list[dict]:
    """Returns the tools as Chat Completions takes them."""
    return [
        {"type": "function", "function": {"name": name, "description": told, "parameters": schema_of(name)}}
        for name, (told, _) in SCHEMAS.items()
    ]


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Runs an asynchronous agent to its end, with ``--cancel`` after a first time that is cancelled."""

    async def play() -> None:
        if OPTIONS.cancel:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(main(), CANCELLED_AFTER_S)
        await main()

    asyncio.run(play())
