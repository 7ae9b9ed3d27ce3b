"""What every client of this folder is asked, and its tool: the question on standard input, submitted numbers on output.

A program is run by path in an environment of its own and imports nothing of PipelineRL. It finds the endpoint in the
variables of OpenAI or Anthropic.
"""

import argparse
import re
import sys

MAX_ANSWERS = 4
"""After so many answers of the model the agent gives up."""

_parser = argparse.ArgumentParser()
_parser.add_argument("--api", default="chat", choices=("chat", "responses", "messages"))
_parser.add_argument("--stream", action="store_true")
OPTIONS = _parser.parse_args()
QUESTION = sys.stdin.read()
LARGEST = max(map(int, re.findall(r"\d+", QUESTION)))


def submit(number: int) -> str:
    """Hand in the answer.

    Args:
        number: the answer.
    """
    sys.stdout.write(f"{number}\n")
    return "right" if number == LARGEST else "too small"
