"""A small coding agent: it asks a model for shell commands, runs them in its folder, and shows the model their output.

It knows nothing of PipelineRL. `python3 agent.py TURNS`, with the task on standard input. Standard library only.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
COMMAND_TIMEOUT_S = 20
SHOWN_CHARACTERS = 2000


def ask(messages: list[dict[str, str]]) -> str:
    """Returns the model's answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def run_command(command: str) -> str:
    """Returns the exit code and the output of a shell command."""
    try:
        done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    output = (done.stdout + done.stderr).decode(errors="replace")
    return f"exit code {done.returncode}\n{output[-SHOWN_CHARACTERS:]}"


def work(task: str, turns: int) -> None:
    """Runs the command of each answer, until an answer has none."""
    messages = [{"role": "user", "content": task}]
    for _ in range(turns):
        answer = ask(messages)
        if not (command := COMMAND.search(answer)):
            return
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": run_command(command[1])}]


if __name__ == "__main__":
    work(sys.stdin.read(), int(sys.argv[1]))
