"""An agent as a separate program. It reads a question from standard input and prints the answer of the model.

It is run by path and imports only the standard library.
"""

import json
import os
import sys
import urllib.request

TOOL = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}


def ask(question: str) -> dict:
    """Asks the model over HTTP and returns its message."""
    body = {"model": "policy", "messages": [{"role": "user", "content": question}], "tools": [TOOL]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


if __name__ == "__main__":
    for call in ask(sys.stdin.read()).get("tool_calls") or []:
        arguments = json.loads(call["function"]["arguments"])
        print(arguments.get("number") if isinstance(arguments, dict) else None)
