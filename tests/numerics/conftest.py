"""What several of these tests need of torch."""

import sys
from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    hook = sys.excepthook  # which torch replaces
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    sys.excepthook = hook
