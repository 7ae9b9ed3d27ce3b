"""Servers that somebody else runs: a warning for another model. `integration/test_debug_modes.py` asks real ones."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.launcher.existing_servers import check_existing, compare
from tests.says import says

REQUIRED = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"root": "/models/Qwen2.5-7B", "max_model_len": 10000}, []),
        ({}, []),
        ({"root": "/models/other"}, ["serves /models/other, and model_path is Qwen/Qwen2.5-7B"]),
        (
            {"root": "Qwen2.5-7B", "max_model_len": 4096},
            ["takes 4096 tokens, and vllm_config.vllm_kwargs.max_model_len"],
        ),
    ],
)
def test_difference_between_server_and_configuration_is_a_warning(entry: dict, said: list[str]) -> None:
    warnings = compare("http://a:1", entry, parse(compose("base", REQUIRED)))
    assert len(warnings) == len(said)
    assert all(text in warning for text, warning in zip(said, warnings, strict=True))


@pytest.mark.parametrize(
    ("served", "wanted", "is_refused"),
    [(4096, 4096, False), (4097, 4096, True), (131072, 8192, False), (4000, 8192, True)],
)
def test_server_with_other_factors_of_longrope_is_refused(
    served: int, wanted: int, is_refused: bool, tmp_path: Path
) -> None:
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    limits = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3", "rope_scaling": rope} | limits))
    given = [f"model_path={tmp_path}", f"vllm_config.vllm_kwargs.max_model_len={wanted}"]
    config = parse(compose("base", [*REQUIRED, *given]))
    if not is_refused:
        compare("http://a:1", {"max_model_len": served}, config)
        return
    with pytest.raises(ConfigError, match=says("max_model_len", served, wanted, 4096)):
        compare("http://a:1", {"max_model_len": served}, config)


class Answers:
    """A server that takes scores, and answers `/v1/models` with these bytes. None: it closes the connection."""

    def __init__(self, models: bytes | None, status: int = 200) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(b"", 200)

            def do_GET(self) -> None:
                if models is None:
                    self.connection.shutdown(socket.SHUT_RDWR)
                else:
                    self.answer(models, status)

            def answer(self, body: bytes, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Config:
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return parse(compose("base", [*REQUIRED, f"debug.existing_llms=[{self.url}]"]))

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 200),
        (b"", 200),
        (b"<html>", 200),
        (b'{"data": null}', 200),
        (b'{"data": [7]}', 200),
        (b'{"object": "\xff"}', 200),
        (b"[" * 100_000, 200),
        (b"{}", 404),
    ],
)
def test_server_that_does_not_say_its_model_is_a_warning(body: bytes, status: int) -> None:
    with Answers(body, status) as cfg:
        (warning,) = check_existing(cfg, {})
    assert "does not say which model it serves" in warning
    assert f"status {status} at /v1/models" in warning


def test_server_that_is_not_there_is_refused() -> None:
    cfg = parse(compose("base", [*REQUIRED, "debug.existing_llms=[http://127.0.0.1:9]"]))
    with pytest.raises(ConfigError, match=says("debug.existing_llms", "http://127.0.0.1:9", "does not answer")):
        check_existing(cfg, {})


def test_server_that_is_lost_after_its_first_answer_is_refused() -> None:
    with Answers(None) as cfg, pytest.raises(ConfigError, match=says("debug.existing_llms", "does not answer")):
        check_existing(cfg, {})
