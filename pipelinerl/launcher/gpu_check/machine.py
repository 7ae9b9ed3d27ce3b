"""The machine that is checked. A rehearsal puts CPU and a tiny model in the places of GPU and Qwen2.5-0.5B.

As a trial of its own (`describe`) it answers the machine and what could be imported.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from pipelinerl.config.versions import import_error, installed_versions, missing_names, unsupported
from pipelinerl.launcher.trial import answer
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape

LIBRARIES = ("torch", "vllm", "transformers")
"""The names that this package imports from them are looked up."""
EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "triton", "deepspeed")
"""Compiled parts, or packages that compile."""
GPU_BUCKET_MB = 128
"""As in `conf/base.yaml`. The quickstart has a smaller one for two CPU cores."""
REAL_SHAPE = PUBLISHED_SHAPES["Qwen/Qwen2.5-0.5B"]
TINY_SHAPE = ModelShape(layers=2, hidden=64, intermediate=128, heads=2, kv_heads=1, head_dim=32, vocab=1024, tied=True)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about it on which the checks depend."""

    accelerator: Literal["cuda", "cpu"]
    name: str
    """As CUDA calls the device."""
    devices: int
    memory_bytes: int
    """Per device."""
    architecture: str = ""
    """Compute capability, as `sm_90`."""
    overrides: tuple[str, ...] = ()
    """Settings of every run, from the command line."""
    model: str = ""
    """Folder of a pretrained model for the runs. Empty: they make their own."""

    @property
    def is_rehearsal(self) -> bool:
        return self.accelerator == "cpu"

    @property
    def shape(self) -> ModelShape:
        """The shape of the model with random weights."""
        return TINY_SHAPE if self.is_rehearsal else REAL_SHAPE

    @property
    def trained_lengths(self) -> tuple[int, ...]:
        """Tokens of the micro-batches that are timed."""
        return (128, 256) if self.is_rehearsal else (12_000, 32_000)

    @property
    def run_options(self) -> tuple[str, ...]:
        """Overrides that put a run's server and trainer on one device."""
        if self.is_rehearsal:
            return ("world.accelerator=cpu", "weights.backend=tcp", *self.overrides)
        return (
            *("world.accelerator=cuda", "world.gpus_per_node=1", "world.share_devices=true", "weights.backend=ipc"),
            *("finetune.dtype=bfloat16", "vllm_config.vllm_kwargs.dtype=bfloat16"),
            *("vllm_config.vllm_kwargs.gpu-memory-utilization=0.3", f"weights.bucket_mb={GPU_BUCKET_MB}"),
            *self.overrides,
        )


class Meter:
    """Measures time and memory of a device in a trainer's process. This class: of a CPU, without memory."""

    def reset(self) -> None:
        """Forget the peak."""

    def peak_bytes(self) -> int | None:
        """Most bytes of tensors since ``reset``. None: not known."""
        return None

    def wait(self) -> None:
        """Wait until everything that was started on the device has ended."""

    @contextlib.contextmanager
    def timed(self, seconds: list[float]) -> Iterator[None]:
        """Append the seconds of the block."""
        self.wait()
        started = time.perf_counter()
        yield
        self.wait()
        seconds.append(time.perf_counter() - started)


class CudaMeter(Meter):
    """Measures the current GPU. ``cuda``: the module `torch.cuda`, or a stand-in with these three functions."""

    def __init__(self, cuda: Any):
        self._cuda = cuda

    def reset(self) -> None:
        self._cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int | None:
        self.wait()
        return self._cuda.max_memory_allocated()

    def wait(self) -> None:
        self._cuda.synchronize()


def describe(accelerator: Literal["cuda", "cpu"]) -> dict[str, Any]:
    """The machine, or why it cannot be checked, and the versions of what it has."""
    import torch

    found: dict[str, Any] = {"versions": installed_versions(), "unsupported": unsupported(), "problem": ""}
    extensions = () if accelerator == "cpu" else EXTENSIONS
    failed = [f"{name}: {error}" for name in extensions if (error := import_error(name)) is not None]
    found |= {"missing": [*failed, *missing_names(LIBRARIES)], "cuda": torch.version.cuda or ""}
    if accelerator == "cpu":
        machine = Machine(accelerator="cpu", name="rehearsal on the CPU", devices=1, memory_bytes=2**33)
    elif not torch.cuda.is_available():
        return found | {"problem": "torch sees no CUDA device", "machine": None}
    else:
        properties = torch.cuda.get_device_properties(0)
        machine = Machine(
            accelerator="cuda",
            name=properties.name,
            devices=torch.cuda.device_count(),
            memory_bytes=properties.total_memory,
            architecture=f"sm_{properties.major}{properties.minor}",
        )
    return found | {"machine": msgspec.to_builtins(machine)}


if __name__ == "__main__":
    answer(describe)
