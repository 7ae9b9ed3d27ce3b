"""All ranks of a trainer send: each its stripe, and the servers get the whole model bit by bit."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.receivers import forkserver
from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.publish.origin import STRIPE_UNIT, Origin
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.transfer.checksum import added, checksum
from tests.models import make_mixture, save_qwen2, save_with_words
from tests.rank_processes import call_on_ranks
from tests.ranks import stripes_rank
from tests.sender_kit import sender_settings, take_on_all_ranks, wait_for
from tests.zero3 import shard_everything

SECRET = "unit-test-secret"
RANKS = 4
NUM_BYTES = RANKS * STRIPE_UNIT


@pytest.fixture(scope="module", autouse=True)
def rank_imported_once() -> Iterator[None]:
    with forkserver(stripes_rank.__name__):
        yield


class Trainer:
    """The ends of several ranks in this process."""

    def __init__(self, servers: list[Any], **settings: Any):
        made = sender_settings(
            **({"secret": SECRET, "bucket_bytes": 1 << 14, "timeout_s": 60.0, "stall_s": 60.0} | settings)
        )
        self.origins = [Origin(made, sender="run", rank=rank, ranks=RANKS) for rank in range(RANKS)]
        others = [origin.address for origin in self.origins[1:]]
        jobs = [server.job for server in servers]
        self.sender = WeightSender(lambda: jobs, made, lambda message: None, self.origins[0], others)
        assert self.sender.wait_for_servers(len(servers), 60) == len(servers)
        self._count = len(servers)

    def send(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Takes a version on every rank and waits until all servers serve it."""
        take_on_all_ranks(self.sender, self.origins, version, weights)
        assert self.sender.wait_live(version, 60, count=self._count), self.sender.outcomes
        wait_for(lambda: not self.sender.is_busy)

    @property
    def given(self) -> list[int]:
        return [origin.source_server.num_bytes for origin in self.origins]

    def close(self) -> None:
        self.sender.close()
        for origin in self.origins:
            origin.close()


@pytest.fixture
def make_trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    monkeypatch.setattr("pipelinerl.weights.publish.servers.WATCH_S", 0.05)
    made: list[Trainer] = []

    def make(*servers: Any, **settings: Any) -> Trainer:
        made.append(Trainer(list(servers), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def weights(version: int) -> dict[str, torch.Tensor]:
    """Parameters of which some cross the edges of stripes."""
    generator = torch.Generator().manual_seed(version)
    sizes = {"a": STRIPE_UNIT // 2 - 320, "b": STRIPE_UNIT, "c": 160, "d": STRIPE_UNIT // 2 + 160}
    made = {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    assert Layout(tuple(spec_of(*item) for item in made.items())).num_bytes == NUM_BYTES
    return made


def holds(server: Any, sent: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(server.live[name], tensor) for name, tensor in sent.items())


def test_each_rank_sends_its_stripe_once_for_any_number_of_servers(start_model_server: Any, make_trainer: Any) -> None:
    servers = [start_model_server(f"actor_llm_{i}") for i in range(3)]
    trainer = make_trainer(*servers)
    for version in (0, 1):
        trainer.send(version, weights(version))
        assert all(holds(server, weights(version)) for server in servers)
        assert trainer.given == [(version + 1) * STRIPE_UNIT] * RANKS


def test_each_rank_holds_only_its_stripe_in_memory(start_model_server: Any, make_trainer: Any) -> None:
    trainer = make_trainer(start_model_server())
    for version in range(3):
        trainer.send(version, weights(version))
    held = [
        sum(
            item.buffer.numel() for item in origin.source_server._registry._items.values()
        )  # what servers could still pull
        for origin in trainer.origins
    ]
    assert held == [STRIPE_UNIT] * RANKS


def test_deltas_of_stripes_are_smaller_and_exact(start_model_server: Any, make_trainer: Any) -> None:
    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    trainer = make_trainer(*servers, delta=True)
    sent = weights(0)
    trainer.send(0, sent)
    before = trainer.given
    for version in (1, 2):
        for number, tensor in enumerate(sent.values()):
            tensor[version + number] += 1.0
        trainer.send(version, sent)
        assert all(holds(server, sent) for server in servers)
    assert all(now - then < STRIPE_UNIT / 100 for now, then in zip(trainer.given, before, strict=True))


def test_one_stripe_that_changed_everywhere_makes_the_update_dense(start_model_server: Any, make_trainer: Any) -> None:
    server = start_model_server()
    trainer = make_trainer(server, delta=True)
    sent = weights(0)
    trainer.send(0, sent)
    sent["a"] += 1.0
    trainer.send(1, sent)
    assert holds(server, sent)
    assert trainer.given == [2 * STRIPE_UNIT] * RANKS


def test_checksum_of_the_whole_comes_from_all_ranks(start_model_server: Any, make_trainer: Any) -> None:
    trainer = make_trainer(start_model_server(), delta=True)
    sent = weights(3)
    trainer.send(3, sent)
    whole = torch.zeros(NUM_BYTES, dtype=torch.uint8)
    StripeBuffer(Layout(tuple(spec_of(*item) for item in sent.items())), whole).fill(sent.items())
    described = trainer.sender._ranks.describe(3, RANKS).result(60)
    assert added(description.checksum for description in described) == checksum(whole)


def test_rank_that_is_gone_ends_the_update_with_its_address(start_model_server: Any, make_trainer: Any) -> None:
    from pipelinerl.errors import WeightUpdateError

    trainer = make_trainer(start_model_server(), delta=True, timeout_s=2.0)
    sent = weights(0)
    trainer.send(0, sent)
    trainer.origins[2].close()
    specs = [spec_of(*item) for item in sent.items()]
    plan = trainer.sender.plan()
    trainer.sender.send(1, sent.items(), specs, plan=plan)
    trainer.origins[1].take_snapshot(1, sent.items(), specs, plan)
    with pytest.raises(WeightUpdateError, match=str(trainer.origins[2].address)):
        trainer.sender.wait_live(1, 60)


def check_served(servers: Sequence[Any], out: Path) -> None:
    """Every server serves version 1, whose weights the trainer wrote to ``out``."""
    expected = load_file(out)
    for server in servers:
        assert server.live.keys() == expected.keys()
        assert holds(server, expected)
        assert server.label == "1"


@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_two_ranks_of_a_sharded_trainer_send_half_of_the_model_each(
    start_model_server: Any, tmp_path: Path, engine: str
) -> None:
    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    out = tmp_path / "out.safetensors"
    job = {
        "engine": engine,
        "model": str(save_qwen2(tmp_path / "model", vocab_size=64)),
        "overrides": [shard_everything(tmp_path)] if engine == "deepspeed" else [],
        "urls": [(server.job.name, server.job.url) for server in servers],
        "out": str(out),
    }
    call_on_ranks(stripes_rank.main, job, out, 2)
    check_served(servers, out)
    given = [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)]
    layout = Layout(tuple(spec_of(*item) for item in servers[0].live.items()))
    assert sum(given) == 2 * layout.num_bytes  # two versions
    assert max(given) - min(given) <= 2 * STRIPE_UNIT


@pytest.mark.slow
def test_ranks_that_divide_experts_send_every_byte_of_them_once(start_model_server: Any, tmp_path: Path) -> None:
    """Four ranks, of which each owns half of the experts, to two servers."""
    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    out = tmp_path / "out.safetensors"
    job = {
        "engine": "fsdp2",
        "model": str(save_with_words(make_mixture(64), tmp_path / "model")),
        "overrides": ["finetune.expert_ranks=2"],
        "urls": [(server.job.name, server.job.url) for server in servers],
        "out": str(out),
    }
    call_on_ranks(stripes_rank.main, job, out, 4)
    check_served(servers, out)
    of_experts = [name for name in servers[0].live if ".experts." in name]
    assert len(of_experts) == 2 * 8 * 3
    given = [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(4)]
    assert sum(given) == 2 * Layout(tuple(spec_of(*item) for item in servers[0].live.items())).num_bytes


@pytest.mark.parametrize(
    ("dtype", "delta"), [("bfloat16", "true"), pytest.param("float32", "false", marks=pytest.mark.slow)]
)
def test_two_ranks_of_a_sharded_trainer_write_half_of_the_model_each_to_a_store(
    start_model_server: Any, tmp_path: Path, dtype: str, delta: str
) -> None:
    store, out = tmp_path / "store", tmp_path / "out.safetensors"
    servers = [start_model_server(f"actor_llm_{i}") for i in range(2)]
    for server in servers:
        server.store.follow(str(store))
    job = {
        "engine": "fsdp2",
        "dtype": dtype,
        "model": str(save_qwen2(tmp_path / "model", vocab_size=64, layers=24, hidden=64, intermediate=128)),
        "overrides": ["weights.backend=store", f"weights.store={store}", f"weights.delta={delta}"],
        "urls": [(server.job.name, server.job.url) for server in servers],
        "out": str(out),
    }
    call_on_ranks(stripes_rank.main, job, out, 2)
    check_served(servers, out)
    assert [server.store.follower.failures for server in servers] == [0, 0]
    assert sum(json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(2)) == 0
    sizes = [path.stat().st_size for path in sorted(store.glob("*-0-*.whole"))]
    assert len(sizes) == 2
    assert sum(sizes) == Layout(tuple(spec_of(*item) for item in servers[0].live.items())).num_bytes
    assert max(sizes) - min(sizes) <= 2 * STRIPE_UNIT
