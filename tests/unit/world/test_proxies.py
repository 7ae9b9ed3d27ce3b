"""Where the site has a proxy: the run's own addresses never go through it, foreign ones do."""

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipelinerl
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError, TransportError
from pipelinerl.launcher.existing_servers import check_existing
from pipelinerl.testing import FakeServer
from pipelinerl.utils import is_healthy
from pipelinerl.weights.publish.servers import ServerPool
from pipelinerl.weights.verify.probe import ProbeClient
from pipelinerl.world import Job
from pipelinerl.world.proxies import bypass, check_proxy, open_session
from tests.says import says
from tests.site_proxy import FOREIGN, proxied

LOOPBACK = "localhost,127.0.0.1,::1"
CLIENTS = ("Client", "AsyncClient", "get", "post", "put", "delete", "head", "request", "stream")


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with proxied(monkeypatch) as addresses:
        yield addresses


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({}, LOOPBACK + ",node-0,10.0.0.2", LOOPBACK + ",node-0,10.0.0.2"),
        ({"NO_PROXY": ".corp, 10.0.0.2"}, f".corp,10.0.0.2,{LOOPBACK},node-0", f".corp,10.0.0.2,{LOOPBACK},node-0"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, f"a,{LOOPBACK},node-0,10.0.0.2", f"b,{LOOPBACK},node-0,10.0.0.2"),
        ({"no_proxy": "*"}, None, "*"),
    ],
)
def test_bypass_adds_loopback_and_hosts_to_both_spellings(given: dict, upper: str | None, lower: str) -> None:
    env = dict(given)
    for _ in range(2):  # a role does again what its launcher did
        bypass(env, ["node-0", "10.0.0.2"])
    assert (env.get("NO_PROXY"), env["no_proxy"]) == (upper, lower)


async def test_servers_of_the_run_are_asked_without_the_proxy(reached: list[str]) -> None:
    required = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout"]
    async with FakeServer(lambda *_: [65]) as server:
        assert await asyncio.to_thread(is_healthy, server.url)
        job = Job(name="actor_llm_0", kind="actor_llm", url=server.url)
        probe = ProbeClient(job, secret="s", timeout_s=60)
        with pytest.raises(TransportError, match="404"):  # the fake has no such route
            await asyncio.to_thread(probe.score, {})
        probe.close()
        config = parse(compose("base", [*required, f"debug.existing_llms=[{server.url}]"]))
        (warning,) = await asyncio.to_thread(check_existing, config)
        assert "status 404 at /v1/models" in warning, "the fake answered, and has no such route"
        pool = ServerPool(lambda: [job], secret="s", checker=None, changed=lambda: None)
        await pool.follow()
        (client,) = pool
        assert await client.info() is None, "the fake has no such route"
        await pool.close()
    assert reached == []


async def test_session_of_rollouts_asks_foreign_addresses_alone_through_the_proxy(reached: list[str]) -> None:
    async with FakeServer(lambda *_: [65]) as server, open_session() as session:
        for url in (f"{server.url}/health", FOREIGN):
            async with session.get(url) as answer:
                assert answer.status == 200
    assert reached == [FOREIGN]


async def test_session_takes_the_proxy_of_all_addresses(reached: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        for spelling in (name, name.lower()):
            monkeypatch.setenv(spelling, "")
            monkeypatch.delenv(spelling)
    async with open_session() as session, session.get(FOREIGN) as answer:
        assert answer.status == 200
    assert reached == [FOREIGN]


async def test_session_looks_for_no_proxy_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with proxied(monkeypatch):
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.delenv(name)
        async with open_session() as session:
            assert not session.trust_env


@pytest.mark.parametrize(
    ("variable", "value", "url"),
    [
        ("HTTPS_PROXY", "socks5://10.0.0.1:1080", "https://judge.example/v1"),
        ("https_proxy", "socks5h://10.0.0.1:1080", "https://judge.example/v1"),
        ("HTTP_PROXY", "https://10.0.0.1:3128", "http://judge.example/v1"),
        ("HTTP_PROXY", "proxy.corp:3128", "http://judge.example/v1"),
        ("HTTPS_PROXY", "http://10.0.0.1:port", "https://judge.example/v1"),
        ("ALL_PROXY", "socks5://10.0.0.1:1080", "https://judge.example/v1"),
    ],
)
def test_proxy_that_cannot_carry_a_service_is_refused(
    variable: str, value: str, url: str, reached: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_proxy("judges.good.url", url)
    if variable == "ALL_PROXY":
        monkeypatch.delenv("HTTPS_PROXY")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=says("judges.good.url", url, variable.upper(), "http://", "judge.example")):
        check_proxy("judges.good.url", url)
    monkeypatch.setenv("NO_PROXY", "judge.example")
    check_proxy("judges.good.url", url)


def test_every_client_of_the_package_is_of_one_of_the_two_kinds() -> None:
    """HTTPX obeys the proxies' variables unless it is told otherwise, aiohttp ignores them."""
    root, found = Path(pipelinerl.__file__).parent, []
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "httpx" not in text and "aiohttp" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            if called.startswith("httpx.") and called.split(".")[1] in CLIENTS:
                assert "**own_client()" in ast.unparse(node), f"{path}:{node.lineno}"
                found.append(called)
            elif called == "aiohttp.ClientSession" and path.name != "proxies.py":
                assert "trust_env" not in ast.unparse(node), f"{path}:{node.lineno}: use open_session"
    assert len(found) >= 4
