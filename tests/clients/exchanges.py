"""What a client and the endpoint say to each other: recorded with the client, replayed without it.

``python -m tests.clients.exchanges [PROGRAM …]`` records all programs, or those named, into ``recorded/``. A recording
holds requests and answers word for word, but for what differs from time to time: ids are numbered, times are 0.
"""

import asyncio
import json
import re
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.agents import RecordedAgent, record_agent
from pipelinerl.testing import FakeLLM
from tests.clients.programs import FOLDER, PROGRAMS, PYTHON, QUESTION, Program, run_behind

RECORDED = FOLDER / "recorded"
ID = re.compile(r"\b(chatcmpl-|msg_|resp_|rs_|fc_)([0-9a-f]{24})\b")
TIME = re.compile(r'("created(?:_at)?": )\d+')
KEYS = ("Authorization", "x-api-key")


class Names:
    """Numbers the endpoint's random ids in the order in which they appear."""

    def __init__(self) -> None:
        self._numbered: dict[str, str] = {}

    def fixed(self, text: str) -> str:
        """Returns an answer with numbered ids and without times."""

        def number(found: re.Match) -> str:
            return found[1] + self._numbered.setdefault(found[2], f"{len(self._numbered):024x}")

        return TIME.sub(r"\g<1>0", ID.sub(number, text))

    def live(self, text: str) -> str:
        """Returns a recorded request with the ids of the answers that were given now."""
        ids = {numbered: one for one, numbered in self._numbered.items()}
        return ID.sub(lambda found: found[1] + ids.get(found[2], found[2]), text)


Exchange = dict[str, Any]
"""``path``, ``asked`` (the request's JSON), ``status`` and ``answer`` (text)."""


@asynccontextmanager
async def tapped(agent: RecordedAgent, session: aiohttp.ClientSession) -> AsyncIterator[tuple[str, list[Exchange]]]:
    """A proxy before an endpoint, which keeps every exchange in the order of the answers."""
    seen: list[Exchange] = []

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.text()
        headers = {name: request.headers[name] for name in KEYS if name in request.headers}
        url = agent.anthropic_base_url + request.path
        async with session.request(request.method, url, data=body, headers=headers) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            text = b""
            async for piece in answer.content.iter_any():
                text += piece
                await response.write(piece)
            await response.write_eof()
        seen.append({"path": request.path, "asked": json.loads(body), "status": answer.status, "answer": text.decode()})
        return response

    app = web.Application(client_max_size=2**24)
    app.router.add_route("*", "/{path:.*}", forward)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", seen
    finally:
        await runner.cleanup()


async def play(program: Program, folder: Path) -> dict[str, Any]:
    """Runs a program against the endpoint and returns the recording. ``folder`` is its home."""
    async with aiohttp.ClientSession() as session, record_agent(scripted(program), session) as agent:
        async with tapped(agent, session) as (url, seen):
            command = [str(PYTHON), "-E", *program.arguments(QUESTION)]
            await run_behind(agent, url, command, QUESTION, program.variables(folder))
        names = Names()
        exchanges = json.loads(json.dumps(seen))
        for one in exchanges:
            one["asked"] = json.loads(names.fixed(json.dumps(one["asked"])))
            one["answer"] = names.fixed(one["answer"])
        return {"exchanges": exchanges, "sequences": sequences_of(agent)}


async def replay(program: Program, exchanges: list[Exchange]) -> dict[str, Any]:
    """Sends recorded requests to the endpoint and returns what was recorded then."""
    names = Names()
    again = []
    async with aiohttp.ClientSession() as session, record_agent(scripted(program), session) as agent:
        headers = {"Authorization": f"Bearer {agent.api_key}"}
        for one in exchanges:
            body = names.live(json.dumps(one["asked"]))
            async with session.post(agent.anthropic_base_url + one["path"], data=body, headers=headers) as answer:
                again.append(one | {"status": answer.status, "answer": names.fixed(await answer.text())})
        return {"exchanges": again, "sequences": sequences_of(agent)}


def scripted(program: Program) -> FakeLLM:
    return FakeLLM.saying(program.say, parameters={"temperature": 1.0, "max_tokens": 256})


def sequences_of(agent: RecordedAgent) -> list[dict[str, Any]]:
    """Returns the training sequences: a token is a byte or a mark, so that the text shows each."""
    result = agent.result(reward=1.0, success=True)
    rollout = to_rollout(
        result, attempt=0, latency_s=0.0, num_llm_calls=len(agent.calls), fallback_version=0, seq_length=10**6
    )
    return [
        {"text": agent.llm.tokenizer.decode(one.token_ids), "spans": one.spans.tolist()} for one in rollout.sequences
    ]


def main() -> None:
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PROGRAMS:
        with tempfile.TemporaryDirectory() as folder:
            recording = asyncio.run(play(PROGRAMS[name], Path(folder)))
        (RECORDED / f"{name}.json").write_text(json.dumps(recording, indent=1) + "\n")
        print(name, len(recording["exchanges"]), "exchanges,", len(recording["sequences"]), "sequences", flush=True)


if __name__ == "__main__":
    main()
