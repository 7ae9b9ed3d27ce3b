"""A plugin of vLLM: a CPU server schedules and swaps as one on a GPU does.

- The scheduler is one step ahead of the samples (asynchronous scheduling), which vLLM's CPU platform always turns off.
- Every layer keeps its weight as it was loaded, so that a swap copies into it. A swap that moves a tensor fails, as
  with captured CUDA graphs.
"""

import sys
from typing import Any

import torch

SCHEDULED = "a step was scheduled before the samples of the one before were read"


class Nothing:
    """A CUDA stream, event or context on a device that computes at once."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def register() -> None:
    """Runs in every process of a vLLM server."""
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from pipelinerl.weights.load import plugin, worker

    for name in ("Stream", "Event", "current_stream", "stream"):
        setattr(torch.cuda, name, Nothing)
    check = current_platform.check_and_update_config

    def check_asynchronous(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    current_platform.check_and_update_config = check_asynchronous  # type: ignore[method-assign]
    update, told = AsyncScheduler._update_after_schedule, []

    def update_and_tell(self: Any, scheduled: Any) -> None:
        update(self, scheduled)
        if not told and any(request.num_output_placeholders > 1 for request in self.running):
            told.append(True)
            print(SCHEDULED, file=sys.stderr, flush=True)

    AsyncScheduler._update_after_schedule = update_and_tell  # type: ignore[method-assign]
    plugin.SMALL = sys.maxsize
    worker.captures_graphs = lambda vllm_config: True  # type: ignore[attr-defined]
