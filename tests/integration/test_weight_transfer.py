"""Sender and receiver over real HTTP and Gloo, without vLLM: every failure leaves the old weights and no pause."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.sender import UpdateReport, WeightSender

SECRET = "unit-test-secret"
SHAPES = {"model.embed.weight": (64, 33), "model.norm.weight": (33,), "model.out.weight": (1000, 33)}


def params(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def specs() -> list[ParamSpec]:
    return [spec_of(name, tensor) for name, tensor in params(0).items()]


def send(sender: WeightSender, version: int) -> UpdateReport:
    return sender.send(version, params(version).items(), specs())


def holds(server: Any, version: int) -> bool:
    expected = params(version)
    return server.live.keys() == expected.keys() and all(torch.equal(server.live[n], t) for n, t in expected.items())


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


@pytest.fixture
def make_sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., WeightSender]]:
    monkeypatch.setattr("pipelinerl.weights.sender.WATCH_S", 0.05)
    senders: list[WeightSender] = []

    def make(*servers: Any, **overrides: Any) -> WeightSender:
        settings = {"backend": "gloo", "bucket_mb": 1, "timeout_s": 20.0, "secret": SECRET} | overrides
        senders.append(WeightSender([server.job for server in servers], **settings))
        return senders[-1]

    yield make
    for sender in senders:
        sender.close()


def test_update_of_two_servers_is_exact_labelled_and_resumed(start_model_server: Any, make_sender: Any) -> None:
    servers = [start_model_server("actor_llm_0"), start_model_server("actor_llm_1")]
    sender = make_sender(*servers)
    for version in (0, 1, 7):
        report = send(sender, version)
        assert report.version == version
        assert report.servers == ("actor_llm_0", "actor_llm_1")
        assert report.errors == {}
        assert len(report.pause_ms) == 2
        for server in servers:
            assert holds(server, version)
            assert server.label == str(version)
            assert not server.paused


def test_send_async_returns_a_snapshot_that_later_changes_do_not_reach(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    sender = make_sender(server)
    weights = params(3)
    sender.send_async(3, weights.items(), specs())
    for tensor in weights.values():
        tensor.zero_()
    assert sender.wait().servers == ("actor_llm_0",)
    assert holds(server, 3)


def test_delta_updates_are_smaller_and_exact_and_fall_back_to_dense(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    sender = make_sender(server, delta=True)
    weights = params(0)
    sizes = []
    for version in range(4):
        weights["model.norm.weight"][version] += 1.0
        sizes.append(sender.send(version, weights.items(), specs()).num_bytes)
        assert all(torch.equal(server.live[name], tensor) for name, tensor in weights.items())
    assert all(size < sizes[0] / 100 for size in sizes[1:])
    assert send(sender, 9).num_bytes == sizes[0]
    assert holds(server, 9)


def sha256(weights: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[name].view(torch.uint8).numpy().tobytes() for name in SHAPES)).hexdigest()


def test_delta_of_a_hundred_bf16_optimizer_steps_leaves_the_server_with_the_trainers_bits(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    sender = make_sender(server, delta=True)
    master = {name: (0.02 * tensor).requires_grad_() for name, tensor in params(0).items()}
    optimizer = torch.optim.AdamW(master.values(), lr=1e-6, weight_decay=0.0)
    generator, sizes = torch.Generator().manual_seed(1), []
    for version in range(101):
        weights = {name: tensor.detach().bfloat16() for name, tensor in master.items()}
        report = sender.send(version, weights.items(), [spec_of(*item) for item in weights.items()])
        assert report.errors == {}
        assert sha256(server.live) == sha256(weights)
        sizes.append(report.num_bytes)
        for tensor in master.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
    assert max(sizes[1:]) < sizes[0] / 5


def test_delta_against_a_version_the_server_lost_is_sent_dense(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    sender = make_sender(server, delta=True)
    send(sender, 0)
    server.receiver._buffer_version = None
    report = sender.send(1, params(0).items(), specs())
    assert report.errors == {}
    assert holds(server, 0)
    assert server.label == "1"


def test_two_senders_that_take_turns_never_meet_in_a_stale_group(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = [make_sender(server), make_sender(server)]
    for version in range(4):
        report = send(senders[version % 2], version)
        assert report.errors == {}
        assert report.transfer_ms < 5000
        assert holds(server, version)


def test_weights_that_the_model_refuses_leave_old_ones_live_and_the_server_out_of_service(
    start_model_server: Any, make_sender: Any
) -> None:
    from pipelinerl.errors import WeightUpdateError

    def refuse(layout: Any) -> None:
        if "bad" in layout.specs[0].name:
            raise WeightUpdateError("the model does not know bad.weight")

    server = start_model_server(refuse=refuse)
    sender = make_sender(server)
    send(sender, 0)
    report = sender.send(1, [("bad.weight", torch.zeros(4))], [ParamSpec("bad.weight", "float32", (4,))])
    assert report.servers == ()
    assert "does not know bad.weight" in report.errors["actor_llm_0"]
    assert holds(server, 0)
    assert server.label == "0"
    assert not server.paused


def test_server_that_is_down_costs_no_time(start_model_server: Any, make_sender: Any) -> None:
    up, down = start_model_server("actor_llm_0"), start_model_server("actor_llm_1")
    sender = make_sender(up, down)
    down.stop()
    report = send(sender, 0)
    assert report.servers == ("actor_llm_0",)
    assert report.transfer_ms < 5000
    assert send(sender, 1).servers == ("actor_llm_0",)
    assert not sender.readmit_async()


def test_restarted_server_leaves_service_and_gets_the_current_weights(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    sender = make_sender(server)
    send(sender, 4)
    server.live, server.label = {}, "default"  # what a restart looks like from outside
    server.receiver.abandon()
    server.receiver._group = None
    wait_for(lambda: sender.returning == ("actor_llm_0",))
    assert sender.readmit_async()
    report = sender.wait()
    assert report.servers == ("actor_llm_0",)
    assert holds(server, 4)
    assert not sender.readmit_async()


def test_wrong_secret_is_refused_at_once(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    report = send(make_sender(server, secret="wrong"), 0)
    assert "401" in report.errors["actor_llm_0"]
    assert server.swaps == 0
    assert report.transfer_ms < 5000


CHILD = """
import sys, time
import pipelinerl.weights.group as group
from pipelinerl.weights.protocol import ParamSpec
from pipelinerl.weights.sender import WeightSender
from pipelinerl.world import Job
import torch
original, count = group.GlooGroup.broadcast, 0
def broadcast(self, *args):
    global count
    count += 1
    if count == 3:
        print("half", flush=True)
        time.sleep(600)
    original(self, *args)
group.GlooGroup.broadcast = broadcast
job = Job(name="actor_llm_0", kind="actor_llm", url=sys.argv[1])
sender = WeightSender([job], backend="gloo", bucket_mb=1, timeout_s=float(sys.argv[2]), secret="unit-test-secret")
weight = torch.full((4 << 20,), -1.0)
sender.send(1, [("w", weight)], [ParamSpec("w", "float32", (4 << 20,))])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sender_that_dies_or_freezes_in_the_middle_leaves_a_usable_server(
    start_model_server: Any, make_sender: Any, tmp_path: Path, number: signal.Signals
) -> None:
    server = start_model_server()
    send(make_sender(server), 0)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, server.job.url, "4"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        os.kill(child.pid, number)
        started = time.monotonic()
        wait_for(lambda: server.receiver.transfer.state == "failed")
        assert time.monotonic() - started < 8
        assert holds(server, 0)
        assert server.label == "0"
        assert not server.paused
        report = send(make_sender(server), 2)
        assert report.errors == {}
        assert holds(server, 2)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def test_new_sender_supersedes_one_that_hangs_without_waiting_for_its_time_out(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, server.job.url, "60"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        started = time.monotonic()
        assert send(make_sender(server), 5).errors == {}
        assert time.monotonic() - started < 10
        assert holds(server, 5)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


VALID: dict[str, Any] = {
    "version": 1,
    "params": [["w", "float32", [4]]],
    "group": {"backend": "gloo", "host": "127.0.0.1", "port": 9, "name": "g", "world_size": 2, "is_new": True},
    "bucket_bytes": 1024,
    "timeout_s": 0.5,
}


def variants() -> Iterator[bytes]:
    yield from (b"", b"{", b"null", b"[]", b"\xff\xfe", b'"x"', b"[" * 5000, b'{"version": 1}', b"{}" * 3)
    for key in VALID:
        for bad in (None, [], {}, "x", -1, 1e400, True, [[]]):
            yield json.dumps(VALID | {key: bad}).encode()
        yield json.dumps({other: value for other, value in VALID.items() if other != key}).encode()
    for key in VALID["group"]:
        for bad in (None, [], "", -1, 2**70):
            yield json.dumps(VALID | {"group": VALID["group"] | {key: bad}}).encode()
    yield json.dumps(VALID | {"extra": 1}).encode()
    yield json.dumps(VALID | {"base_version": 3, "payload_bytes": 10}).encode()
    yield json.dumps(VALID | {"base_version": 3}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [2**47]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [2**47, 2**47]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [4]], ["w", "float32", [4]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "floatx", [4]]]}).encode()
    yield json.dumps(VALID).encode()  # nobody listens on that port


def test_invalid_bodies_get_4xx_and_the_server_lives(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    headers = {"Authorization": f"Bearer {SECRET}"}
    with httpx.Client(base_url=server.job.url, headers=headers, timeout=30) as client:
        for body in variants():
            status = client.post("/receive_weight_update", content=body).status_code
            assert 400 <= status < 500, (status, body[:200])
    assert server.swaps == 0
    assert send(make_sender(server), 0).errors == {}
    assert holds(server, 0)


def test_updates_that_arrive_together_are_taken_one_after_the_other(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = [make_sender(server), make_sender(server)]
    reports: list[UpdateReport] = []
    threads = [threading.Thread(target=lambda s=s, v=v: reports.append(send(s, v))) for v, s in enumerate(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    live = [report for report in reports if not report.errors]
    assert live
    assert any(holds(server, report.version) and server.label == str(report.version) for report in live)
    assert not server.paused
