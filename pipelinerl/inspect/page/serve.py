"""Serves the page of running runs on loopback. The browser asks for new data every few seconds.

One request at a time reads the runs, and its data is reused for `FRESH_S`, so that several tabs need one reading.
"""

import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pipelinerl.inspect.page.build import MAX_ROLLOUT_BYTES, build_page, collect, encode

FRESH_S = 2.0
LOOPBACK = "127.0.0.1"


class LiveRuns:
    """The data of the runs, read again if it is older than `fresh_s`. Any thread may ask for it."""

    def __init__(self, run_dirs: Sequence[Path], fresh_s: float = FRESH_S):
        self._run_dirs, self._fresh_s = run_dirs, fresh_s
        self._lock = threading.Lock()
        self._read_at = -float("inf")
        self._runs: list[dict[str, Any]] = []

    def runs(self) -> list[dict[str, Any]]:
        with self._lock:
            if time.monotonic() - self._read_at > self._fresh_s:
                self._runs = [collect(path, MAX_ROLLOUT_BYTES // len(self._run_dirs)) for path in self._run_dirs]
                self._read_at = time.monotonic()
            return self._runs


def make_server(live: LiveRuns, port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the page at `/` and of its data at `/data`. Pages of other sites cannot read them."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            if host not in (LOOPBACK, "localhost"):
                self.send_error(403, "only as 127.0.0.1 or localhost")
            elif self.path == "/":
                self._answer("text/html; charset=utf-8", build_page(live.runs(), live=True))
            elif self.path == "/data":
                self._answer("application/octet-stream", encode(live.runs()))
            else:
                self.send_error(404)

        def _answer(self, kind: str, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return ThreadingHTTPServer((LOOPBACK, port), Handler)
