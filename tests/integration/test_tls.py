"""TLS with certificates made from the run's secret, and with given ones: HTTP and redis, honest and wrong clients."""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
import uvicorn

from pipelinerl.config.environment import CA_VARIABLE
from pipelinerl.config.load import compose, parse
from pipelinerl.config.rules.machines import tls_files_are_complete
from pipelinerl.config.sections import Config, VerifierSection, WorldSection
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.errors import ConfigError, StreamError
from pipelinerl.membership.address import RedisAddress, open_store, parse_address
from pipelinerl.streams import SingleStreamSpec
from pipelinerl.streams.redis import RedisBackend
from pipelinerl.streams.redis_server import await_redis, redis_config, start_redis, stop_redis
from pipelinerl.utils import is_healthy
from pipelinerl.world.map import url_of
from pipelinerl.world.network import find_port_block
from pipelinerl.world.tls import adopt, client_context, made_authority, made_server, server_files

SECRET, OTHER = {"PIPELINERL_SECRET": "s" * 20}, {"PIPELINERL_SECRET": "t" * 20}


def config(**settings: Any) -> Config:
    required = ["output_dir=/tmp/x", "dataset_loader=a.b", "actor.rollout_policy=a.c"]
    return parse(compose("base", [*required, *(f"world.{key}={value}" for key, value in settings.items())]))


def world(**settings: Any) -> WorldSection:
    return config(**settings).world


def trusting(env: dict[str, str]) -> dict[str, str]:
    """The environment of a client that knows the secret in ``env``."""
    known = dict(env)
    adopt(world(tls="true"), known)
    return known


def test_made_certificates_are_the_same_wherever_the_secret_is_known():
    assert made_authority(SECRET) == made_authority(SECRET)
    assert made_server("host-1", SECRET) == made_server("host-1", SECRET)
    assert made_authority(SECRET) != made_authority(OTHER)
    assert made_server("host-1", SECRET)[0] != made_server("host-2", SECRET)[0]
    with pytest.raises(ConfigError, match="PIPELINERL_SECRET, which is not set"):
        made_authority({})


def test_without_tls_nothing_changes():
    env = dict(SECRET)
    adopt(world(), env)
    assert env == SECRET
    assert server_files(world(), "host", SECRET) is None
    assert client_context(env) is True
    assert url_of("actor_llm", "h", 1, tls=False) == "http://h:1"


def test_urls_of_a_run_with_tls_say_so():
    assert url_of("actor_llm", "h", 1, tls=True) == "https://h:1"
    assert url_of("redis", "::1", 2, tls=True) == "rediss://[::1]:2"
    address = RedisAddress("10.0.0.1", 7, "run", tls=True)
    assert (str(address), parse_address(str(address))) == ("rediss://10.0.0.1:7/run", address)


@pytest.mark.parametrize("settings", [{"tls_cert": "c"}, {"tls": "true", "tls_cert": "c", "tls_key": "k"}])
def test_given_files_are_complete_or_refused(settings: dict[str, str]):
    assert "tls_ca` go together" in (tls_files_are_complete(config(**settings)) or "")
    complete = {"tls": "true", "tls_cert": "c", "tls_key": "k", "tls_ca": "a"}
    assert tls_files_are_complete(config(**complete)) is tls_files_are_complete(config()) is None


@contextlib.contextmanager
def serving(app: Any, files: tuple[str, str]) -> Iterator[int]:
    port = find_port_block("127.0.0.1", 1)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_config=None, ssl_certfile=files[0], ssl_keyfile=files[1]
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server._serve()))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        yield port
    finally:
        server.should_exit = True
        thread.join()


async def health(port: int, env: dict[str, str], host: str = "localhost") -> tuple[int, int]:
    """Statuses that the run's two HTTP clients get."""
    url, context = f"https://{host}:{port}/health", client_context(env)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
        async with session.get(url) as response:
            first = response.status
    async with httpx.AsyncClient(verify=context) as client:
        return first, (await client.get(url)).status_code


@pytest.fixture(params=["made", "given"])
def certified(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[tuple[str, str], dict[str, str]]:
    """A server's files, and the environment of a client that trusts it."""
    if request.param == "made":
        files = server_files(world(tls="true"), "127.0.0.1", SECRET)
        assert files
        assert Path(files[1]).stat().st_mode & 0o077 == 0
        return files, trusting(SECRET)
    paths = {"tls_ca": tmp_path / "ca", "tls_cert": tmp_path / "cert", "tls_key": tmp_path / "key"}
    paths["tls_ca"].write_text(made_authority(OTHER))
    for path, content in zip((paths["tls_cert"], paths["tls_key"]), made_server("127.0.0.1", OTHER), strict=True):
        path.write_text(content)
    section, env = world(tls="true", **paths), dict(SECRET)
    adopt(section, env)
    files = server_files(section, "127.0.0.1", SECRET)
    assert files == (str(paths["tls_cert"]), str(paths["tls_key"]))
    return files, env


async def test_http_clients_trust_the_runs_authority(
    certified: tuple[tuple[str, str], dict[str, str]], monkeypatch: pytest.MonkeyPatch
):
    files, env = certified
    settings = VerifierSection(workers=1, timeout_s=5.0, memory_mb=512, max_body_kb=64, judges=[])
    app = create_app(settings, secret=SECRET["PIPELINERL_SECRET"])
    with serving(app, files) as port:
        for host in ("localhost", "127.0.0.1"):
            assert await health(port, env, host) == (200, 200)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await health(port, trusting({"PIPELINERL_SECRET": "u" * 20}))
        assert not await asyncio.to_thread(is_healthy, f"https://localhost:{port}")
        monkeypatch.setenv(CA_VARIABLE, env[CA_VARIABLE])
        assert await asyncio.to_thread(is_healthy, f"https://localhost:{port}")
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)


def test_the_machines_own_authorities_are_trusted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "roots.pem").write_text(made_authority(OTHER))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "roots.pem"))
    context = client_context(trusting(SECRET))
    assert isinstance(context, ssl.SSLContext)
    assert sorted(context.get_ca_certs(binary_form=True)) == sorted(
        ssl.PEM_cert_to_DER_cert(made_authority(secret)) for secret in (SECRET, OTHER)
    )


def test_a_certificate_for_another_name_is_refused():
    files = server_files(world(tls="true"), "node-7", SECRET)
    assert files
    context = client_context(trusting(SECRET))
    assert isinstance(context, ssl.SSLContext)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*files)
    for name, passes in (("node-7", True), ("node-8", False)):
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        here = context.wrap_bio(incoming, outgoing, server_hostname=name)
        there = server.wrap_bio(outgoing, incoming, server_side=True)
        refused = False
        for side in (here, there, here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError:
                refused = True
                break
        assert refused is not passes


@pytest.mark.skipif(not shutil.which("redis-server"), reason="needs redis-server")
def test_streams_and_leases_over_redis_with_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    files, port = server_files(world(tls="true"), "127.0.0.1", SECRET), find_port_block("127.0.0.1", 1)
    for name, value in trusting(SECRET).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIPELINERL_REDIS_PASSWORD", "password")
    process = start_redis(
        redis_config(
            port=port, data_dir=tmp_path, password="password", address=None, fsync="never", max_record_mb=64, tls=files
        ),
        subprocess.DEVNULL,
    )
    try:
        await_redis(process, port, "password", tls=True)
        backend = RedisBackend(port=port, password="password", run_id="r", tls=True)
        spec = SingleStreamSpec(tmp_path, "t")
        appender, cursor = backend.open_appender(spec), backend.open_cursor(spec, "me", None)
        appender.append(b"record")
        assert [bytes(payload) for _, payload in cursor.read(60.0)] == [b"record"]
        store = open_store(RedisAddress("127.0.0.1", port, "r", tls=True))
        assert store.leases() == {}
        for end in (appender, cursor):
            end.close()
        plain = RedisBackend(port=port, password="password", run_id="r", outage_timeout_s=0.1)
        with pytest.raises(StreamError, match="did not answer"):
            plain.open_appender(spec)
        monkeypatch.setenv("PIPELINERL_CA", made_authority(OTHER))
        stranger = RedisBackend(port=port, password="password", run_id="r", outage_timeout_s=0.1, tls=True)
        with pytest.raises(StreamError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.open_appender(spec)
    finally:
        stop_redis(process)
