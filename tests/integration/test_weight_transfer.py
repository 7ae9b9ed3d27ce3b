"""Sender and receivers over real HTTP and connections, without vLLM: a failure leaves the old weights and no pause."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch

from pipelinerl.inference.weight_update import Handover
from pipelinerl.weights.layout import Layout, spec_of
from pipelinerl.weights.protocol import Failed, PayloadRange, WeightUpdateRequest
from pipelinerl.weights.transfer.wire import WireError
from tests.says import says
from tests.sender_kit import Senders, wait_for

SECRET = "unit-test-secret"
SHAPES = {"model.embed.weight": (64, 33), "model.norm.weight": (33,), "model.out.weight": (1000, 33)}


def params(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def holds(server: Any, version: int) -> bool:
    expected = params(version)
    return server.live.keys() == expected.keys() and all(torch.equal(server.live[n], t) for n, t in expected.items())


@pytest.fixture
def make_sender(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Senders]]:
    monkeypatch.setattr("pipelinerl.weights.publish.servers.WATCH_S", 0.05)
    made: list[Senders] = []

    def make(*servers: Any, **overrides: Any) -> Senders:
        made.append(Senders(*servers, **({"timeout_s": 60.0, "secret": SECRET} | overrides)))
        return made[-1]

    yield make
    for one in made:
        one.sender.close()


def test_update_of_two_servers_is_exact_labelled_and_resumed(start_model_server: Any, make_sender: Any) -> None:
    servers = [start_model_server("actor_llm_0"), start_model_server("actor_llm_1")]
    senders = make_sender(*servers)
    for version in (0, 1, 7):
        outcomes = senders.send(version, params(version))
        assert [outcome.error for outcome in outcomes.values()] == ["", ""]
        assert senders.sender.wait_live(version, 60, count=2)
        message = senders.announced[-1]
        assert (message.version, message.older, len(message.pause_ms)) == (version, {}, 2)
        for server in servers:
            assert holds(server, version)
            assert server.label == str(version)


def test_every_byte_leaves_the_trainer_once_and_goes_from_server_to_server(
    start_model_server: Any, make_sender: Any
) -> None:
    servers = [start_model_server(f"actor_llm_{i}") for i in range(4)]
    senders = make_sender(*servers, stall_s=60.0)
    outcomes = senders.send(0, params(0))
    (num_bytes,) = {outcome.num_bytes for outcome in outcomes.values()}
    assert senders.sender.origin.source_server.num_bytes == num_bytes
    assert sorted(server.receiver.source_server.num_bytes for server in servers) == [0, num_bytes, num_bytes, num_bytes]
    assert all(holds(server, 0) for server in servers)


def test_send_returns_a_snapshot_that_later_changes_do_not_reach(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    sender = make_sender(server).sender
    weights = params(3)
    sender.send(3, weights.items(), [spec_of(*item) for item in weights.items()])
    for tensor in weights.values():
        tensor.zero_()
    assert sender.wait_live(3, 60)
    assert holds(server, 3)


def test_server_that_comes_late_is_fed_by_one_that_has_the_version(start_model_server: Any, make_sender: Any) -> None:
    first, late = start_model_server("actor_llm_0"), start_model_server("actor_llm_1")
    senders = make_sender(first, stall_s=60.0)
    senders.send(5, params(5))
    given = senders.sender.origin.source_server.num_bytes
    senders.servers.append(late)
    assert senders.sender.wait_live(5, 60, count=2)
    assert holds(late, 5)
    assert senders.sender.origin.source_server.num_bytes == given
    assert first.receiver.source_server.num_bytes == given


def test_teachers_server_is_sent_every_version_and_neither_probed_nor_announced(
    start_model_server: Any, make_sender: Any
) -> None:
    """It is in the chain of the others. Nobody calibrates it, so it waits for no text of the probe."""
    policy, teacher = start_model_server("actor_llm_0"), start_model_server("preprocessor_llm_0")
    senders = make_sender(policy, teacher)
    for version in (0, 1):
        outcomes = senders.send(version, params(version))
        assert {name: outcome.error for name, outcome in outcomes.items()} == {
            "actor_llm_0": "",
            "preprocessor_llm_0": "",
        }
        assert holds(policy, version)
        assert holds(teacher, version)
        wait_for(lambda version=version: senders.announced and senders.announced[-1].version == version)
        assert senders.announced[-1].servers == ("actor_llm_0",)
        assert senders.announced[-1].older == {}
    alone = make_sender(teacher, probe_tolerance=1e-3)
    alone.send(2, params(2))
    assert holds(teacher, 2)
    assert alone.announced == []


def test_server_that_the_provider_names_no_more_is_not_announced(start_model_server: Any, make_sender: Any) -> None:
    servers = [start_model_server("actor_llm_0"), start_model_server("actor_llm_1")]
    senders = make_sender(*servers)
    senders.send(0, params(0))
    del senders.servers[0]
    wait_for(lambda: senders.sender.stats.servers == ("actor_llm_1",))
    assert set(senders.send(1, params(1))) == {"actor_llm_1"}


class HeldServer:
    """Keeps an update from being staged until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.let_go.set()

    def __call__(self, layout: Any) -> None:
        assert self.let_go.wait(60)


def test_slow_server_holds_up_neither_the_announcement_nor_the_next_version(
    start_model_server: Any, make_sender: Any
) -> None:
    hold = HeldServer()
    fast, slow = start_model_server("actor_llm_0"), start_model_server("actor_llm_1", refuse=hold)
    senders = make_sender(fast, slow, stall_s=0.2)
    senders.send(0, params(0))
    hold.let_go.clear()
    for version in (1, 2, 3):
        assert senders.send(version, params(version), up=1)["actor_llm_0"].error == ""
        wait_for(lambda version=version: senders.sender.stats.version == version)
        assert senders.announced[-1].older == {"actor_llm_1": 0}
        assert holds(fast, version)
    hold.let_go.set()
    assert senders.sender.wait_live(3, 60, count=2)
    assert holds(slow, 3)
    assert [message.older["actor_llm_1"] for message in senders.announced if message.older] == [0, 0, 0, 1]


def test_sender_is_busy_until_the_servers_have_the_version(start_model_server: Any, make_sender: Any) -> None:
    hold = HeldServer()
    server = start_model_server(refuse=hold)
    senders = make_sender(server)
    senders.send(0, params(0))
    hold.let_go.clear()
    weights = params(1)
    senders.sender.send(1, weights.items(), [spec_of(*item) for item in weights.items()])
    assert senders.sender.is_busy
    assert not senders.sender.wait_live(1, 0.2)
    hold.let_go.set()
    wait_for(lambda: not senders.sender.is_busy)
    assert senders.sender.wait_live(1, 60)


def test_delta_updates_are_smaller_and_exact_and_fall_back_to_dense(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = make_sender(server, delta=True)
    weights = params(0)
    sizes = []
    for version in range(4):
        weights["model.norm.weight"][version] += 1.0
        sizes.append(senders.send(version, weights)["actor_llm_0"].num_bytes)
        assert all(torch.equal(server.live[name], tensor) for name, tensor in weights.items())
    assert all(size < sizes[0] / 100 for size in sizes[1:])
    assert senders.send(9, params(9))["actor_llm_0"].num_bytes == sizes[0]
    assert holds(server, 9)


def sha256(weights: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(weights[name].view(torch.uint8).numpy().tobytes() for name in SHAPES)).hexdigest()


def test_delta_of_a_hundred_bf16_optimizer_steps_leaves_the_server_with_the_trainers_bits(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    senders = make_sender(server, delta=True)
    master = {name: (0.02 * tensor).requires_grad_() for name, tensor in params(0).items()}
    optimizer = torch.optim.AdamW(master.values(), lr=1e-6, weight_decay=0.0)
    generator, sizes = torch.Generator().manual_seed(1), []
    for version in range(101):
        weights = {name: tensor.detach().bfloat16() for name, tensor in master.items()}
        outcome = senders.send(version, weights)["actor_llm_0"]
        assert outcome.error == ""
        assert sha256(server.live) == sha256(weights)
        sizes.append(outcome.num_bytes)
        for tensor in master.values():
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        optimizer.step()
    assert max(sizes[1:]) < sizes[0] / 5


def test_delta_against_a_version_the_server_lost_is_sent_dense(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = make_sender(server, delta=True)
    senders.send(0, params(0))
    server.receiver.staging._held = None
    senders.send(1, params(0))
    assert senders.sender.wait_live(1, 60)
    assert holds(server, 0)
    assert server.label == "1"


def test_version_that_the_trainer_has_replaced_is_given_up_at_once(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = make_sender(server)
    for version in (0, 1):
        senders.send(version, params(version))
    specs = tuple(spec_of(*item) for item in params(0).items())
    part = PayloadRange(start=0, end=Layout(specs).num_bytes, sources=(senders.sender.origin.address,))
    request = WeightUpdateRequest(
        sender=senders.sender.origin.sender,
        version=0,
        params=specs,
        workers=((part,),),
        transport="tcp",
        bucket_bytes=1 << 20,
        timeout_s=600.0,
        stall_s=300.0,
    )
    started = time.monotonic()
    with pytest.raises(WireError, match=says("withdrawn", "version 0")):
        Handover(server.receiver.address, SECRET).run(request)
    assert time.monotonic() - started < 60
    assert holds(server, 1)


def test_two_senders_that_take_turns_never_mix_their_bytes(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = [make_sender(server), make_sender(server)]
    for version in range(4):
        (outcome,) = senders[version % 2].send(version, params(version)).values()
        assert outcome.error == ""
        assert outcome.seconds < 60
        assert holds(server, version)


def test_weights_that_the_model_refuses_leave_old_ones_live_and_the_server_out_of_service(
    start_model_server: Any, make_sender: Any
) -> None:
    from pipelinerl.errors import WeightUpdateError

    def refuse(layout: Any) -> None:
        if "bad" in layout.specs[0].name:
            raise WeightUpdateError("the model does not know bad.weight")

    server = start_model_server(refuse=refuse)
    senders = make_sender(server)
    senders.send(0, params(0))
    (outcome,) = senders.send(1, {"bad.weight": torch.zeros(16)}).values()
    assert "does not know bad.weight" in outcome.error
    wait_for(lambda: senders.announced[-1].servers == ())
    assert holds(server, 0)
    assert server.label == "0"


def test_updates_end_with_the_servers_words_when_all_of_them_refuse_for_too_long(
    start_model_server: Any, make_sender: Any
) -> None:
    """One that goes on taking updates is enough."""
    from pipelinerl.errors import WeightUpdateError

    refusing = {"actor_llm_0"}

    def refuse_as(name: str) -> Any:
        def refuse(layout: Any) -> None:
            if name in refusing:
                raise WeightUpdateError("mapping of buffer object failed")

        return refuse

    names = ("actor_llm_0", "actor_llm_1")
    servers = [start_model_server(name, refuse=refuse_as(name)) for name in names]
    sender = make_sender(*servers, patience_s=0.5).sender
    weights = params(0)
    specs = tuple(spec_of(name, weight) for name, weight in weights.items())
    sender.send(0, weights.items(), specs)
    began = time.monotonic()
    assert sender.wait_live(0, 60)
    wait_for(lambda: time.monotonic() - began > 1.0 and "mapping" in sender.outcomes["actor_llm_0"].error)
    sender.check()
    refusing.add("actor_llm_1")
    sender.send(1, weights.items(), specs)
    with pytest.raises(WeightUpdateError, match=says("no server has taken an update for 0.5 s", "actor_llm_1")):
        sender.wait_live(1, 60)


def test_server_that_is_down_costs_no_time(start_model_server: Any, make_sender: Any) -> None:
    up, down = start_model_server("actor_llm_0"), start_model_server("actor_llm_1")
    senders = make_sender(up, down)
    assert senders.sender.wait_for_servers(2, 60) == 2
    down.stop()
    for version in (0, 1):
        assert senders.send(version, params(version), up=1)["actor_llm_0"].seconds < 60
        wait_for(lambda version=version: senders.sender.stats.version == version)
        assert senders.announced[-1].servers == ("actor_llm_0",)


def test_restarted_server_leaves_service_and_gets_the_current_weights(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    senders = make_sender(server)
    senders.send(4, params(4))
    server.live, server.label = {}, "default"  # what a restart looks like from outside
    wait_for(lambda: server.label == "4")
    assert senders.sender.wait_live(4, 60)
    assert holds(server, 4)
    assert [message.servers for message in senders.announced] == [("actor_llm_0",), (), ("actor_llm_0",)]


def test_wrong_secret_is_refused_at_once(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    (outcome,) = make_sender(server, secret="wrong").send(0, params(0)).values()
    assert "401" in outcome.error
    assert server.swaps == 0
    assert outcome.seconds < 60


CHILD = """
import sys, time
import torch
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.world import Job
from tests.sender_kit import sender_settings
job = Job(name="actor_llm_0", kind="actor_llm", url=sys.argv[1])
settings = sender_settings(timeout_s=float(sys.argv[2]), secret="unit-test-secret")
sender, count = WeightSender(lambda: [job], settings, lambda message: None), 0
def pace(num_bytes):
    global count
    count += 1
    if count == 3:
        print("half", flush=True)
        time.sleep(600)
sender.origin.source_server._pace = pace
sender.wait_for_servers(1, 60)
weight = torch.full((4 << 20,), -1.0)
sender.send(1, [("w", weight)], [spec_of("w", weight)])
time.sleep(600)
"""


def start_child(server: Any, timeout_s: float) -> subprocess.Popen:
    """A sender in a process of its own that stops in the middle of an update."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, server.job.url, str(timeout_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"half\n"
    return child


def end_child(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sender_that_dies_or_freezes_in_the_middle_leaves_a_usable_server(
    start_model_server: Any, make_sender: Any, number: signal.Signals
) -> None:
    server = start_model_server()
    make_sender(server).send(0, params(0))
    child = start_child(server, 4)
    try:
        os.kill(child.pid, number)
        wait_for(lambda: isinstance(server.receiver.transfer.end, Failed))
        assert holds(server, 0)
        assert server.label == "0"
        (outcome,) = make_sender(server).send(2, params(2)).values()
        assert outcome.error == ""
        assert holds(server, 2)
    finally:
        end_child(child)


def test_new_sender_supersedes_one_that_hangs_without_waiting_for_its_time_out(
    start_model_server: Any, make_sender: Any
) -> None:
    server = start_model_server()
    child = start_child(server, 600)
    try:
        started = time.monotonic()
        (outcome,) = make_sender(server).send(5, params(5)).values()
        assert outcome.error == ""
        assert time.monotonic() - started < 60
        assert holds(server, 5)
    finally:
        end_child(child)


VALID: dict[str, Any] = {
    "sender": "s",
    "version": 1,
    "params": [["w", "float32", [4]]],
    "workers": [[{"start": 0, "end": 64, "sources": [["127.0.0.1", 9]]}]],
    "carriage": "tcp",
    "bucket_bytes": 1024,
    "timeout_s": 0.5,
    "stall_s": 0.2,
}
PART = VALID["workers"][0][0]


def variants() -> Iterator[bytes]:
    yield from (b"", b"{", b"null", b"[]", b"\xff\xfe", b'"x"', b"[" * 5000, b'{"version": 1}', b"{}" * 3)
    for key in VALID:
        for bad in (None, [], {}, "", -1, 1e400, True, [[]]):
            yield json.dumps(VALID | {key: bad}).encode()
        yield json.dumps({other: value for other, value in VALID.items() if other != key}).encode()
    for key in PART:
        for bad in (None, [], "", -1, 2**70, [["", 1]], [["h", 0]]):
            yield json.dumps(VALID | {"workers": [[PART | {key: bad}]]}).encode()
    for start, end in ((0, 0), (0, 32), (32, 64), (64, 0), (0, 65), (0, 2**40)):
        yield json.dumps(VALID | {"workers": [[PART | {"start": start, "end": end}]]}).encode()
    yield json.dumps(VALID | {"workers": [[PART], [PART]]}).encode()
    yield json.dumps(VALID | {"workers": [[PART, PART]]}).encode()
    yield json.dumps(VALID | {"extra": 1}).encode()
    yield json.dumps(VALID | {"base_version": 3}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [2**47]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [2**47, 2**47]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "float32", [4]], ["w", "float32", [4]]]}).encode()
    yield json.dumps(VALID | {"params": [["w", "floatx", [4]]]}).encode()
    yield json.dumps(VALID).encode()  # nobody listens on that port


def test_invalid_bodies_get_4xx_and_the_server_lives(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    headers = {"Authorization": f"Bearer {SECRET}"}
    with httpx.Client(base_url=server.job.url, headers=headers, timeout=60) as client:
        for body in variants():
            status = client.post("/receive_weight_update", content=body).status_code
            assert 400 <= status < 500, (status, body[:200])
    assert server.swaps == 0
    make_sender(server).send(0, params(0))
    assert holds(server, 0)


def test_updates_that_arrive_together_are_taken_one_after_the_other(start_model_server: Any, make_sender: Any) -> None:
    server = start_model_server()
    senders = [make_sender(server), make_sender(server)]
    threads = [threading.Thread(target=s.send, args=(v, params(v))) for v, s in enumerate(senders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The sender that was interrupted may still repeat its update.
    wait_for(lambda: any(holds(server, version) and server.label == str(version) for version in range(2)))
    assert server.swaps >= 1
