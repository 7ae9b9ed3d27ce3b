"""A weight sender in a test, one version at a time."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipelinerl.config.keys import declared
from pipelinerl.config.sections import WeightsSection
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.origin import Origin, SenderSettings
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.publish.servers import UpdateOutcome


def weights_section(**given: Any) -> WeightsSection:
    """The section `weights` with these keys, and the defaults of the others."""
    return WeightsSection(**({key.last: key.default for key in declared(WeightsSection)} | given))


def sender_settings(bucket_bytes: int = 1 << 20, **given: Any) -> SenderSettings:
    """Settings of a sender. What is no setting of its own is a key of `weights`."""
    own = {name: given.pop(name) for name in list(given) if name in SenderSettings.__dataclass_fields__}
    return SenderSettings(**own, weights=weights_section(bucket_mb=bucket_bytes / 2**20, **given))


class Senders:
    """A sender with what it announced.

    Args:
        servers: objects with a `job`.
        settings: of the sender.
    """

    def __init__(self, *servers: Any, **settings: Any):
        self.servers, self.announced = list(servers), list[Any]()
        self.sender = WeightSender(
            lambda: [server.job for server in self.servers],
            sender_settings(**settings),
            self.announced.append,
        )

    def send(
        self, version: int, weights: Mapping[str, torch.Tensor], *, up: int | None = None, scores: Any = None
    ) -> dict[str, UpdateOutcome]:
        """Send a version when ``up`` (all) servers are up; returns how it ended on each."""
        wait_for(lambda: not self.sender.is_busy)
        wanted = len(self.servers) if up is None else up
        assert self.sender.wait_for_servers(wanted, 60) >= wanted
        self.sender.send(version, weights.items(), [spec_of(*item) for item in weights.items()], scores)
        wait_for(lambda: not self.sender.is_busy)
        return {name: outcome for name, outcome in self.sender.outcomes.items() if outcome.version == version}


def take_on_all_ranks(
    sender: WeightSender, origins: Sequence[Origin], version: int, weights: Mapping[str, torch.Tensor]
) -> None:
    """Take a version on rank 0, which sends it, and on all other ranks."""
    specs, plan = [spec_of(*item) for item in weights.items()], sender.plan()
    sender.send(version, weights.items(), specs, plan=plan)
    for origin in origins[1:]:
        origin.take_snapshot(version, weights.items(), specs, plan)


def wait_for(condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)
