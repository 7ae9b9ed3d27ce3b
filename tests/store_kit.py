"""A trainer of several ranks that writes to a store of weights, in a test."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipelinerl.weights.publish.origin import Origin
from pipelinerl.weights.publish.sender import WeightSender
from tests.sender_kit import sender_settings, take_on_all_ranks, wait_for

SECRET = "unit-test-secret"
RANKS = 3


class Trainer:
    """Several ranks of a trainer in this process, which write to a store."""

    def __init__(self, url: str, servers: list[Any], *, ranks: int = RANKS, keep: int = 2, **settings: Any):
        given = {"secret": SECRET, "timeout_s": 60.0, "stall_s": 5.0, "store": url, "store_keep": keep}
        made = sender_settings(**(given | settings))
        name = uuid.uuid4().hex
        self.origins = [Origin(made, sender=name, rank=rank, ranks=ranks) for rank in range(ranks)]
        self.servers, self.announced = servers, list[Any]()
        self.sender = WeightSender(
            lambda: [server.job for server in self.servers],
            made,
            self.announced.append,
            self.origins[0],
            [origin.address for origin in self.origins[1:]],
        )
        assert self.sender.wait_for_servers(len(servers), 60) == len(servers)

    def take_snapshot(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        wait_for(lambda: not self.sender.is_busy)
        take_on_all_ranks(self.sender, self.origins, version, weights)

    def send(self, version: int, weights: dict[str, torch.Tensor]) -> None:
        """Publish a version and wait until all servers serve it."""
        self.take_snapshot(version, weights)
        assert self.sender.wait_live(version, 60, count=len(self.servers)), self.sender.outcomes

    def close(self) -> None:
        self.sender.close()
        for origin in self.origins:
            origin.close()


def trainers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Trainer]]:
    """Yields a function that makes trainers, and closes them."""
    monkeypatch.setattr("pipelinerl.weights.publish.servers.WATCH_S", 0.05)
    monkeypatch.setattr("pipelinerl.weights.publish.servers.COMING_S", 0.01)
    monkeypatch.setattr("pipelinerl.weights.publish.store_delivery.RETRY_S", 0.05)
    made: list[Trainer] = []

    def make(url: str, *servers: Any, **settings: Any) -> Trainer:
        made.append(Trainer(url, list(servers), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def weights(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """24 layers, some of which cross the edges of the ranks' stripes."""
    generator = torch.Generator().manual_seed(version)
    made = {"embed": torch.randn(320, 160, generator=generator)}
    for layer in range(24):
        made[f"layers.{layer}.w"] = torch.randn(96, 80, generator=generator)
        made[f"layers.{layer}.norm"] = torch.randn(81, generator=generator)
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def holds(server: Any, sent: dict[str, torch.Tensor]) -> bool:
    return server.live.keys() == sent.keys() and all(torch.equal(server.live[name], sent[name]) for name in sent)


def following(server: Any, make_trainer: Callable[..., Trainer], url: str) -> tuple[Any, Trainer]:
    """The server, which follows the store at ``url``, and a trainer that has given it version 0."""
    server.store.follow(url)
    trainer = make_trainer(url, server)
    trainer.send(0, weights(0))
    return server, trainer
