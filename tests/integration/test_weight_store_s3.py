"""A store of weights behind S3's protocol: moto on this machine, through s3fs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipelinerl.weights.store import files
from tests.sender_kit import wait_for


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[str]:
    """The URL of a bucket."""
    log = tmp_path / "moto.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stdout=stream, stderr=stream
        )
    try:
        wait_for(lambda: "Running on http://" in log.read_text(), 60)
        endpoint = log.read_text().partition("Running on ")[2].split()[0]
        assert httpx.put(f"{endpoint}/weights").status_code == 200
        for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        yield "s3://weights/run"
    finally:
        process.kill()
        process.wait()


def test_versions_and_differences_go_through_a_bucket(bucket: str, start_model_server: Any) -> None:
    """The servers end before their bucket: else they would ask it again and again."""
    from tests.store_kit import Trainer, holds, weights

    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    servers[0].store.follow(bucket)
    trainer = Trainer(bucket, servers[:1], delta=True)
    try:
        sent = weights(0)
        for version in range(3):
            sent["embed"][version] += 1.0
            trainer.send(version, sent)
            assert holds(servers[0], sent)
        late = servers[1].store.follow(bucket)
        wait_for(lambda: servers[1].label == "2")
        assert holds(servers[1], sent)
        assert late.failures == 0
        large = os.urandom(3 * files.CHUNK_BYTES)
        written = files.open_files(bucket).put("large", memoryview(large))
        assert files.open_files(bucket).size("large") == written.num_bytes == len(large)
        with files.open_files(bucket).open("large", 1 << 20) as reader:
            piece = bytearray(1 << 20)
            reader.seek(files.CHUNK_BYTES)
            assert reader.readinto(memoryview(piece)) == len(piece)
        assert piece == large[files.CHUNK_BYTES : files.CHUNK_BYTES + len(piece)]
        files.open_files(bucket).remove("large")
        assert "large" not in files.open_files(bucket).names()
    finally:
        trainer.close()
