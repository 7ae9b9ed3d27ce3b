"""Access control: every route outside the open list needs the run's bearer secret, and no body is without a limit.

Every route that a future vLLM adds is closed, too. A server that listens on loopback alone opens the routes that
clients of a run need, any other one its health. Without a secret in the environment closed routes are closed to all.
"""

import hmac
import os
from typing import Any

from pipelinerl.config.environment import SECRET_VARIABLE, STRANGERS_VARIABLE, is_on
from pipelinerl.records.answers import ANSWER_PATH

HEALTH_PATHS = frozenset({"/health", "/ping"})
OPEN_PATHS = HEALTH_PATHS | frozenset(
    {
        "/version",
        "/load",
        "/metrics",
        "/weight_info",
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
        "/inference/v1/generate",
        ANSWER_PATH,
        "/tokenize",
        "/detokenize",
    }
)
MAX_BODY_BYTES = 64 << 20
"""Largest body: the parameter list of a mixture-of-experts model takes a few megabytes, images take more."""
MAX_TEXT_BYTES = 1 << 20
"""Largest body of a route that tokenizes or detokenizes, which takes a core 2.7 s per megabyte."""
TEXT_PATHS = frozenset({"/tokenize", "/detokenize"})


def max_bytes(path: str) -> int:
    return MAX_TEXT_BYTES if path in TEXT_PATHS else MAX_BODY_BYTES


def is_authorized(header: str | None, secret: str | None) -> bool:
    """Compares in constant time. An empty or missing secret authorizes no caller."""
    if not secret or header is None:
        return False
    return hmac.compare_digest(header.encode("latin-1"), f"Bearer {secret}".encode())


class RouteAccess:
    """ASGI middleware around the whole application (vLLM's ``--middleware``). Reads the secret from the environment."""

    def __init__(self, app: Any):
        self._app, self._secret = app, os.environ.get(SECRET_VARIABLE)
        self._open = HEALTH_PATHS if is_on(os.environ, STRANGERS_VARIABLE) else OPEN_PATHS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        path, headers = scope["path"], {name.lower(): value for name, value in scope["headers"]}
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        if path not in self._open and not is_authorized(authorization, self._secret):
            return await _refuse(scope, send, 401, "this route needs the run's bearer secret")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length[:20]) > max_bytes(path) or b"transfer-encoding" in headers:
            return await _refuse(scope, send, 413, f"the body must declare a length of at most {max_bytes(path)} bytes")
        return await self._app(scope, receive, send)


async def _refuse(scope: Any, send: Any, status: int, message: str) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": message})
        return
    body = b'{"error": "%s"}' % message.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
