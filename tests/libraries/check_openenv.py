"""OpenEnv servers, with the library: the guide's server plays, and a server that fails is no reward."""

import asyncio
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
import websockets

from pipelinerl.actor.failures import classify
from pipelinerl.domains.libraries import openenv
from pipelinerl.domains.libraries.openenv import generate_rollout, load_problems
from pipelinerl.testing import run_rollout

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "openenv.md").read_text()
CODE = re.search(r"```python\n# guess_env.py\n(.*?)```", GUIDE, re.DOTALL)[1]


def problem(url: str, **settings: Any) -> dict[str, Any]:
    (one,) = load_problems(["train"], {url: settings}, action_field="number", max_turns=4, num_train_problems=1)
    return one


@pytest.fixture(scope="module")
def guessing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The guide's server with two sessions."""
    folder = tmp_path_factory.mktemp("guess")
    (folder / "guess_env.py").write_text(CODE.replace("max_concurrent_envs=256", "max_concurrent_envs=2"))
    sys.path.insert(0, str(folder))
    import guess_env

    server = uvicorn.Server(uvicorn.Config(guess_env.app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join()
    sys.path.remove(str(folder))


async def test_server_of_the_guide_is_played(guessing: str):
    result = await run_rollout(generate_rollout, problem(guessing), ["1", "2", " 3", "4"])
    assert (result.metrics.reward, result.metrics.success) == (1.0, True)
    assert result.training_texts[1].prompt_text.count("no") == 1


async def test_invalid_action_ends_the_episode(guessing: str):
    result = await run_rollout(generate_rollout, problem(guessing), ["many"])
    assert (result.metrics.reward, result.metrics.success, len(result.training_texts)) == (-1.0, False, 1)


async def test_more_rollouts_than_sessions_wait_for_one(guessing: str):
    replies = ["1", "2", "3", "4"]
    rollouts = (run_rollout(generate_rollout, problem(guessing), replies) for _ in range(6))
    assert [result.metrics.reward for result in await asyncio.gather(*rollouts)] == [1.0] * 6


@pytest.mark.parametrize("how", ["down", "closes", "errors", "closes later"])
async def test_failing_server_is_no_reward(how: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openenv, "WAIT_S", 0.0)

    async def answer(connection: Any) -> None:
        async for _ in connection:
            if how == "closes":
                return
            if how == "errors":
                error = {"message": "no space left", "code": "EXECUTION_ERROR"}
                await connection.send(json.dumps({"type": "error", "data": error}))
            else:
                data = {"observation": {"text": "?"}, "reward": 1.0, "done": False}
                await connection.send(json.dumps({"type": "observation", "data": data}))
                await anext(aiter(connection))
                return

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    async with websockets.serve(answer, "127.0.0.1", 0) as server:
        url = nobody if how == "down" else f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(Exception, match="OpenEnv server") as raised:
            await run_rollout(generate_rollout, problem(url), ["1", "2", "3", "4"])
    assert classify(raised.value) == "transport"
