"""What a stranger hears: `python stranger.py HOST PORT …` prints, as JSON, the first line of every port's answers."""

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

THREADS = 64
SILENCE_S = 1.0
BODY = b'{"prompt": "x", "model": "policy", "max_tokens": 1}'
GET = ("/health", "/version", "/v1/models", "/weight_info", "/metrics")
POST = (
    "/v1/completions",
    "/v1/chat/completions",
    "/inference/v1/generate",
    "/answers",
    "/tokenize",
    "/pause",
    "/batch",
)
LARGE = 3_000_000


def ask(host: str, port: int, question: bytes) -> str:
    """The first line of the answer; nothing if there is none within a second."""
    try:
        with socket.create_connection((host, port), SILENCE_S) as stream:
            stream.settimeout(SILENCE_S)
            stream.sendall(question)
            return stream.recv(200).split(b"\r\n")[0][:80].decode("latin-1")
    except OSError:
        return ""


def http(method: str, path: str, length: int, body: bytes = b"") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body


def answers(host: str, port: int) -> dict[str, str]:
    questions = {"": b"", "redis": b"PING\r\n", "large /tokenize": http("POST", "/tokenize", LARGE)}
    questions |= {path: http("GET", path, 0) for path in GET}
    questions |= {path: http("POST", path, len(BODY), BODY) for path in POST}
    return {name: ask(host, port, question) for name, question in questions.items()}


if __name__ == "__main__":
    with ThreadPoolExecutor(THREADS) as pool:  # most ports are silent: their questions wait
        heard = pool.map(lambda port: answers(sys.argv[1], int(port)), sys.argv[2:])
        print(json.dumps(dict(zip(sys.argv[2:], heard, strict=True))))
