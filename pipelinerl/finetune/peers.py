"""Communication between the trainer's ranks in a separate Gloo group, which does not interfere with training.

It is used while a checkpoint is written or read, by one thread at a time. An operation that fails on one rank fails on
all of them, so that no rank waits for one that gave up.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from pipelinerl.errors import CheckpointError
from pipelinerl.finetune.meeting import gather_objects

T = TypeVar("T")


class Peers:
    """Collective operations among all ranks. With a single rank nothing is sent."""

    def __init__(self, rank: int = 0, world_size: int = 1):
        """Collective if ``world_size`` > 1. The default process group must exist then."""
        self.rank, self.world_size = rank, world_size
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, by rank. Collective."""
        if self.world_size == 1:
            return [value]
        return gather_objects(value, torch.device("cpu"), self._group)

    def together(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` and return every rank's result, by rank. Collective.

        Raises:
            CheckpointError: on all ranks, if ``work`` failed on any rank.
        """
        result, failure = None, None
        try:
            result = work()
        except (OSError, SafetensorError, CheckpointError, ValueError, RuntimeError) as error:
            failure = str(error) or type(error).__name__
        answers = self.gather((result, failure))
        failures = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(answers) if reason]
        if failures:
            raise CheckpointError("; ".join(failures) if self.world_size > 1 else str(failure))
        return [answer for answer, _ in answers]  # type: ignore[misc]
