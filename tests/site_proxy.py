"""A proxy of a site on loopback, which notes what reaches it and answers it in the place of the server."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pipelinerl.domains import largest
from pipelinerl.rollouts import RolloutResult

FOREIGN = "http://judge.example/v1"
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@contextlib.contextmanager
def proxied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Puts the proxy into the environment, where nothing is exempt. Yields the addresses that reach it."""
    reached: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reached.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_CONNECT = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.lower(), raising=False)
        for name in VARIABLES[:3]:
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_address[1]}")
        try:
            yield reached
        finally:
            server.shutdown()
            thread.join()


async def generate_rollout(cfg: Any, llm: Any, problem: dict[str, Any], session: Any) -> RolloutResult:
    """The quickstart's rollout, after which a foreign service is asked."""
    result = await largest.generate_rollout(cfg, llm, problem, session)
    async with session.get(FOREIGN) as answer:
        answer.raise_for_status()
    return result
