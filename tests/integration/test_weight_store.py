"""Weights through a store: ranks write, servers fetch by themselves; what is incomplete or changed is never served."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.publish.origin import STRIPE_UNIT
from pipelinerl.weights.store import files, publisher
from pipelinerl.weights.store.manifest import NAME
from tests.sender_kit import wait_for
from tests.store_kit import RANKS, SECRET, Trainer, following, holds, trainers, weights


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    yield from trainers(monkeypatch)


@pytest.fixture(params=["folder", "memory"])
def url(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store in a folder, and one behind fsspec."""
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    import fsspec
    from fsspec.implementations.memory import MemoryFileSystem

    opened = MemoryFileSystem._open

    def opened_alone(system: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        """All readers of a file in memory share one place in it, and here two servers are threads of one process."""
        file = opened(system, path, mode, **options)
        return io.BytesIO(file.getvalue()) if mode == "rb" else file

    monkeypatch.setattr(MemoryFileSystem, "_open", opened_alone)
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    system, root = fsspec.url_to_fs(name)
    if system.exists(root):
        system.rm(root, recursive=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_servers_fetch_what_all_ranks_wrote_bit_by_bit(
    start_model_server: Any, make_trainer: Any, url: str, dtype: torch.dtype
) -> None:
    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    for server in servers:
        server.store.follow(url)
    trainer = make_trainer(url, *servers)
    for version in (0, 1, 7):
        trainer.send(version, weights(version, dtype))
        assert all(holds(server, weights(version, dtype)) for server in servers)
        assert [server.label for server in servers] == [str(version)] * 2
        message = trainer.announced[-1]
        assert (message.version, sorted(message.servers)) == (version, ["actor_llm_0", "actor_llm_1"])
    assert sum(origin.source_server.num_bytes for origin in trainer.origins) == 0
    stripes = [name for name in files.open_files(url).names() if "-7-" in name and name.endswith("whole")]
    assert len(stripes) == RANKS
    layout = Layout(tuple(spec_of(*item) for item in weights(0, dtype).items()))
    assert sum(files.open_files(url).size(name) or 0 for name in stripes) == layout.num_bytes > 2 * STRIPE_UNIT


def test_differences_are_small_and_a_late_server_applies_them_all(
    start_model_server: Any, make_trainer: Any, url: str
) -> None:
    first, late = start_model_server("actor_llm_0"), start_model_server("actor_llm_1")
    first.store.follow(url)
    trainer = make_trainer(url, first, delta=True)
    sent = weights(0)
    for version in range(5):
        sent["embed"].view(-1)[version] += 1.0
        sent["layers.23.norm"][version] += 1.0
        trainer.send(version, sent)
        assert holds(first, sent)
    sizes = [files.open_files(url).size(name) for name in files.open_files(url).names() if name.endswith("delta")]
    assert len(sizes) == 4 * RANKS
    assert sum(sizes) < STRIPE_UNIT / 10
    late.store.follow(url)
    wait_for(lambda: late.label == "4")
    assert holds(late, sent)
    assert late.swaps == 1


def test_whole_version_is_written_again_when_differences_outgrow_it(
    start_model_server: Any, make_trainer: Any, url: str
) -> None:
    server = start_model_server()
    server.store.follow(url)
    trainer = make_trainer(url, server, delta=True, keep=1, stall_s=0.01)
    sent = weights(0)
    kinds = []
    for version in range(12):
        for tensor in sent.values():
            tensor.view(-1)[: tensor.numel() // 8] += 1.0  # a quarter of the bytes
        trainer.send(version, sent)
        assert holds(server, sent)
        names = [name for name in files.open_files(url).names() if f"-{version}-0." in name]
        kinds.append(names[0].rpartition(".")[2])
    assert kinds == (["whole"] + 3 * ["delta"]) * 3 or kinds == (["whole"] + 4 * ["delta"]) * 2 + ["whole", "delta"]


def test_restarted_server_and_restarted_trainer_go_on_with_the_newest(
    start_model_server: Any, make_trainer: Any, url: str
) -> None:
    server = start_model_server("actor_llm_0")
    server.store.follow(url)
    first = make_trainer(url, server)
    for version in (3, 4):
        first.send(version, weights(version))
    other = start_model_server("actor_llm_1")  # as one that was restarted: it has nothing
    other.store.follow(url)
    wait_for(lambda: other.label == "4")
    first.close()
    second = make_trainer(url, server, other)
    assert second.sender.stats.version == -1, "a version of the former trainer is not the present one's"
    second.send(4, weights(104))  # a step that is made a second time
    assert holds(server, weights(104))
    assert holds(other, weights(104))
    wait_for(lambda: second.announced[-1].version == 4)


def test_damaged_file_is_not_served_and_the_next_version_is(
    start_model_server: Any, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.weights.load.store_follower.LONGEST_PAUSE_S", 0.05)
    url = str(tmp_path / "store")
    server, late = start_model_server("actor_llm_0"), start_model_server("actor_llm_1")
    server.store.follow(url)
    trainer = make_trainer(url, server)
    trainer.send(0, weights(0))
    path = next(Path(url).glob("*-0-1.whole"))
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    follower = late.store.follow(url)
    wait_for(lambda: follower.failures >= 2)
    assert "SHA-256" in follower.reason
    assert path.name in follower.reason
    assert (late.label, late.swaps) == ("default", 0)
    trainer.servers.append(late)
    trainer.send(1, weights(1))
    assert holds(late, weights(1))


@pytest.mark.parametrize("damage", ["cut", "gone", "longer"])
def test_incomplete_file_is_found_before_memory_is_changed_for_it(
    start_model_server: Any, make_trainer: Any, tmp_path: Path, damage: str
) -> None:
    url = str(tmp_path / "store")
    server, trainer = following(start_model_server(), make_trainer, url)
    server.store.follower.close()
    server.store.follower.join()
    trainer.take_snapshot(1, weights(1))
    wait_for(lambda: not (trainer.sender.is_busy and b"-1-0.whole" not in (Path(url) / NAME).read_bytes()))
    path = next(Path(url).glob("*-1-2.whole"))
    {"cut": lambda: os.truncate(path, 100), "gone": path.unlink, "longer": lambda: os.truncate(path, 1 << 30)}[damage]()
    follower = server.store.follow(url)
    follower._held = (1, 0, 0)
    wait_for(lambda: follower.failures >= 1)
    assert path.name in follower.reason
    assert server.receiver.staging.key is not None
    assert server.receiver.staging.key.endswith("/0")
    assert holds(server, weights(0))


HOSTILE = {
    "nothing": b"",
    "bytes": os.urandom(1000),
    "a pickle": b"\x80\x04\x95.",
    "too large": b"0" * (9 << 20),
    "unsigned": b"0" * 64 + b'\n{"generation":9,"sender":"x","steps":[]}',
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_manifest_changes_nothing(start_model_server: Any, make_trainer: Any, url: str, kind: str) -> None:
    server, trainer = following(start_model_server(), make_trainer, url)
    files.open_files(url).put(NAME, memoryview(HOSTILE[kind]))
    wait_for(lambda: server.store.follower.failures >= 1)
    assert NAME in server.store.follower.reason
    assert holds(server, weights(0))
    trainer.send(1, weights(1))
    assert holds(server, weights(1))


def test_manifest_of_an_earlier_time_is_refused(start_model_server: Any, make_trainer: Any, url: str) -> None:
    server, trainer = following(start_model_server(), make_trainer, url)
    old = files.open_files(url).get(NAME, 1 << 20)
    trainer.send(1, weights(1))
    files.open_files(url).put(NAME, memoryview(old))
    wait_for(lambda: server.store.follower.failures >= 1)
    assert "older" in server.store.follower.reason
    assert server.label == "1"


def test_full_disk_keeps_the_former_version_and_is_tried_again(
    start_model_server: Any, make_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    url = str(tmp_path / "store")
    server, trainer = following(start_model_server(), make_trainer, url)
    is_full, put = threading.Event(), files.FolderFiles.put
    is_full.set()

    def full(self: Any, name: str, content: memoryview) -> Any:
        if is_full.is_set() and "-1-2." in name:
            raise files.StoreError("the store: [Errno 28] No space left on device")
        return put(self, name, content)

    monkeypatch.setattr(files.FolderFiles, "put", full)
    trainer.take_snapshot(1, weights(1))
    wait_for(lambda: "event=version_not_published version=1" in caplog.text)
    assert "No space left on device" in caplog.text
    assert server.label == "0"
    is_full.clear()
    assert trainer.sender.wait_live(1, 60)
    assert holds(server, weights(1))


def test_server_that_missed_its_probe_fetches_the_whole_version_again(
    start_model_server: Any, make_trainer: Any, url: str
) -> None:
    from pipelinerl.records import ProbeMissed

    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    for server in servers:
        server.store.follow(url)
    trainer = make_trainer(url, *servers, delta=True)
    sent = weights(0)
    for version in range(2):
        sent["embed"][version] += 1.0
        trainer.send(version, sent)
    before = servers[0].swaps
    miss = ProbeMissed(server="actor_llm_0", version=1, since=0, is_final=False, reason="test")
    trainer.sender._loop.call(lambda: trainer.sender._queue_miss(miss))
    wait_for(lambda: any(getattr(message, "server", "") == "actor_llm_0" for message in trainer.announced))
    wait_for(lambda: set(getattr(trainer.announced[-1], "servers", ())) == {"actor_llm_0", "actor_llm_1"})
    assert servers[0].swaps == before + 1
    assert all(holds(server, sent) for server in servers)
    sent["embed"][5] += 1.0
    trainer.send(2, sent)
    assert all(holds(server, sent) for server in servers)


def test_store_does_not_grow_with_the_versions(start_model_server: Any, make_trainer: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    server = start_model_server()
    server.store.follow(url)
    trainer = make_trainer(url, server, ranks=2, stall_s=0.01)
    small = {"w": torch.zeros(STRIPE_UNIT, dtype=torch.bfloat16)}
    counts = []
    for version in range(30):
        small["w"][version] = version
        trainer.send(version, small)
        counts.append(len(os.listdir(url)))
    assert holds(server, small)
    assert max(counts[10:]) <= max(counts[:10]) + 2  # one more version may be in passing
    assert len(list(Path(url).glob("*.whole"))) <= 2 * 2 * 2  # two ranks, two versions that stay, two in passing


WRITER = """
import sys, torch, uuid
from tests.store_kit import Trainer, weights
trainer = Trainer(sys.argv[1], [], ranks=2)
version = 0
while True:
    trainer.take_snapshot(version, weights(version))
    print(version, flush=True)
    version += 1
"""


def test_killed_writer_leaves_a_version_that_is_whole(start_model_server: Any, url: str, tmp_path: Path) -> None:
    if url.startswith("memory"):
        pytest.skip("a store in memory ends with its process")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    late = start_model_server()
    follower = late.store.follow(url)
    for turn in range(2):
        process = subprocess.Popen([sys.executable, "-c", WRITER, url], env=env, stdout=subprocess.PIPE, cwd=root)
        assert process.stdout is not None
        for _ in range(3 + turn):
            process.stdout.readline()
        time.sleep(0.003 * turn)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        manifest = publisher.unsealed((Path(url) / NAME).read_bytes(), SECRET)
        wait_for(lambda manifest=manifest: follower._held == manifest.order)
        assert holds(late, weights(manifest.version))
        assert manifest.generation == turn + 1
    assert follower.failures == 0
