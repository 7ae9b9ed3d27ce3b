"""What is not on the open list needs the secret, nothing is open because nobody thought of it, no body is unbounded."""

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from pipelinerl.inference.access import OPEN_PATHS, RouteAccess, is_authorized


def client(monkeypatch: pytest.MonkeyPatch, secret: str | None) -> TestClient:
    if secret is None:
        monkeypatch.delenv("PIPELINERL_SECRET", raising=False)
    else:
        monkeypatch.setenv("PIPELINERL_SECRET", secret)
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def anything(path: str) -> dict[str, str]:
        return {"path": path}

    app.add_middleware(RouteAccess)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/inference/v1/generate", "/weight_info", "/tokenize"])
def test_generation_and_health_are_open(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    assert client(monkeypatch, "s3cret").post(path).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/pause", "/receive_weight_update", "/collective_rpc", "/", "/health/", "//health", "/v1/load_lora_adapter"],
)
def test_everything_else_needs_the_secret(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    server = client(monkeypatch, "s3cret")
    assert server.post(path).status_code == 401
    assert server.post(path, headers={"Authorization": "Bearer s3cre"}).status_code == 401
    assert server.post(path, headers={"Authorization": "s3cret"}).status_code == 401
    assert server.post(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200


@pytest.mark.parametrize("secret", [None, ""])
def test_without_a_secret_closed_routes_stay_closed(monkeypatch: pytest.MonkeyPatch, secret: str | None) -> None:
    server = client(monkeypatch, secret)
    assert server.post("/pause", headers={"Authorization": "Bearer "}).status_code == 401
    assert server.post("/pause", headers={"Authorization": "Bearer None"}).status_code == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS - {"/health", "/ping"}))
def test_where_strangers_reach_the_server_nothing_but_health_is_open(monkeypatch: pytest.MonkeyPatch, path: str):
    monkeypatch.setenv("PIPELINERL_STRANGERS", "1")
    server = client(monkeypatch, "s3cret")
    assert server.post(path).status_code == 401
    assert server.post(path, headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/pause", 64 << 20),
        ("/v1/completions", 64 << 20),
        ("/answers", 64 << 20),
        ("/health", 64 << 20),
        ("/tokenize", 1 << 20),
        ("/detokenize", 1 << 20),
    ],
)
def test_bodies_of_all_routes_are_limited(monkeypatch: pytest.MonkeyPatch, path: str, limit: int) -> None:
    server, secret = client(monkeypatch, "s3cret"), {"Authorization": "Bearer s3cret"}
    assert server.post(path, headers=secret | {"Content-Length": str(limit)}).status_code == 200
    for length in (str(limit + 1), "9" * 5000, "-1", "x"):
        assert server.post(path, headers=secret | {"Content-Length": length}).status_code == 413

    def chunks() -> Any:
        yield b"x"

    assert server.post(path, headers=secret, content=chunks()).status_code == 413


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer \xe9", "Basic s3cret"])
def test_is_authorized_refuses_odd_headers(header: str | None) -> None:
    assert not is_authorized(header, "s3cret")
