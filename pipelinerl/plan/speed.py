"""Predicted tokens/s, MFU and pause of an update, for the dry run and the planner. Pure; nothing here was measured.

A roofline over the data sheet of the GPU. MFU counts 6 operations per active parameter and trained token, or 2 per
decoded one (arXiv:2204.02311). `pipelinerl gpu-check` compares the prediction with a card.
"""

import re
from functools import partial

import msgspec
import numpy as np

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server, most_rollouts, sends_adapter
from pipelinerl.errors import ConfigError
from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.memory import kv_cache_bytes, staged_bytes, utilization, with_choices
from pipelinerl.plan.model_shape import ModelShape
from pipelinerl.plan.throughput import Utilisation
from pipelinerl.plan.training_memory import recomputed_layers
from pipelinerl.weights.staging_memory import COMMUNICATORS, fits_on_device
from pipelinerl.world.cluster import gpu_memory_bytes, gpu_names
from pipelinerl.world.map import WorldMap

DECODE_BANDWIDTH_EFFICIENCY = 0.6
DECODE_COMPUTE_EFFICIENCY = 0.4
TRAIN_COMPUTE_EFFICIENCY = 0.35
"""Shares of the data sheet's figures. Assumed: good enough for a first split, until rates are measured."""
SEQUENCE_HOST_S = 6.9e-3 / 256
"""Host time of a decoding step for each sequence, which vLLM schedules: 37,000 tokens/s of 256 sequences on an H200
(docs/testing.md). That it grows with the sequences is assumed."""
TRAINED_FLOPS, DECODED_FLOPS = 6, 2
"""Operations per parameter and token that count as useful: without attention and recomputed activations."""
MEAN_SHARE = 0.3
"""Mean length of a completion as a share of `max_tokens`, where none is given."""
PROMPT_TOKENS = 500
"""Mean length of a prompt, where none is given."""
COPY_SHARE = 0.39
"""Speed of a copy within a GPU over its bandwidth: 1.3 of 3.35 TB/s on an H100."""
HOST_BYTES_PER_S = 50e9
"""From pinned host memory to a GPU, over PCIe 5."""
COPY_S = 8e-6
"""Host time of one copy, which the device does not wait for once it has others."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a GPU's data sheet."""

    flops: float
    """Dense 16-bit operations per second."""
    bandwidth: float
    """Bytes per second."""
    memory: int
    """Bytes, as NVML counts them."""


MIB = 2**20
# NVIDIA's data sheets, without sparsity and with sums in float32, and the memory that nvidia-smi shows.
GPUS = {
    "4090": Gpu(flops=165e12, bandwidth=1.01e12, memory=24564 * MIB),
    "L4": Gpu(flops=121e12, bandwidth=0.3e12, memory=23034 * MIB),
    "A10G": Gpu(flops=70e12, bandwidth=0.6e12, memory=23028 * MIB),
    "L40": Gpu(flops=181e12, bandwidth=0.86e12, memory=46068 * MIB),
    "L40S": Gpu(flops=362e12, bandwidth=0.86e12, memory=46068 * MIB),
    "A100": Gpu(flops=312e12, bandwidth=2.0e12, memory=81920 * MIB),
    "A100-40GB": Gpu(flops=312e12, bandwidth=1.56e12, memory=40960 * MIB),
    "H20": Gpu(flops=148e12, bandwidth=4.0e12, memory=97871 * MIB),
    "H100": Gpu(flops=989e12, bandwidth=3.35e12, memory=81559 * MIB),
    "H100-PCIe": Gpu(flops=756e12, bandwidth=2.0e12, memory=81559 * MIB),
    "H200": Gpu(flops=989e12, bandwidth=4.8e12, memory=143771 * MIB),
    "B200": Gpu(flops=2250e12, bandwidth=8.0e12, memory=183359 * MIB),
    "B300": Gpu(flops=2250e12, bandwidth=8.0e12, memory=275040 * MIB),
}
"""By the words of CUDA's name: "NVIDIA A100-SXM4-40GB" is an "A100-40GB"."""
OTHER_BUILDS = {"laptop", "d", "mig", "nvl"}
"""Words of CUDA's names of GPUs that have other figures than the one they are named after."""
ASSUMED_GPU = "H100"


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one device that only decodes or only trains."""

    decode: Utilisation
    """tokens/s with h sequences at a time on the device."""
    train: float
    """tokens/s."""
    max_concurrency: int
    """Sequences per device that fit in memory, or the largest measured batch."""
    source: str


class RoleSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of job is predicted to do."""

    kind: str
    devices: int
    tokens_per_s: float
    """Sum over all devices."""
    mfu: float
    note: str


def find_gpu(name: str) -> str | None:
    """Key in ``GPUS`` of the GPU that CUDA calls ``name``, the one of most words. None: not known."""
    words = set(name.lower().replace("-", " ").split())
    found = [key for key in GPUS if words.issuperset(key.lower().split("-"))]
    return None if words & OTHER_BUILDS else max(found, key=len, default=None)


def gpu_named(name: str | None) -> tuple[str, Gpu]:
    """Data sheet of the GPU that CUDA calls ``name``, after its name for a table. None or unknown: `ASSUMED_GPU`'s."""
    if name is None:
        return f"{ASSUMED_GPU} assumed", GPUS[ASSUMED_GPU]
    found = find_gpu(name)
    if found is None:
        return f"{ASSUMED_GPU} in the place of {name}, whose data sheet is not known", GPUS[ASSUMED_GPU]
    return found, GPUS[found]


def planned_gpu(cfg: Config) -> tuple[str, Gpu, int]:
    """Name for a table, data sheet, and bytes of the GPU that is planned for, which `world.gpu` describes.

    Raises:
        ConfigError: `world.gpu` is in no data sheet here, or its name has another size of memory.
    """
    wanted = cfg.world.gpu
    name, gpu = gpu_named(wanted)
    sizes = [int(size) for size in re.findall(r"([1-9]\d*)gb", (wanted or "").lower())]
    # A name rounds, and error correction takes a sixteenth of an L4's 24 GB.
    if wanted and (find_gpu(wanted) is None or any(abs(gpu.memory / 2**30 / size - 1) > 0.1 for size in sizes)):
        raise ConfigError(f"`world.gpu` is {wanted!r}: known are {', '.join(sorted(GPUS))}")
    found = () if wanted and cfg.dry_run else gpu_memory_bytes()
    if not found:
        return name, gpu, gpu.memory
    return *gpu_named(next(iter(gpu_names()), None)), min(found)


def measured_rates(decode_points: dict[float, float], train: float) -> Rates:
    """Interpolate measured rates linearly between the points and from the origin.

    Args:
        decode_points: tokens/s of decoding by sequences at a time, per device.
        train: tokens/s of training, per device.

    Raises:
        ValueError: there is no point, or a value is not positive.
    """
    if not decode_points or min(decode_points) <= 0 or min(*decode_points.values(), train) <= 0:
        raise ValueError(
            "measured rates must be positive: give at least one sequences:tokens_per_second and a train rate"
        )
    heights = np.array([0.0, *sorted(decode_points)])
    rates = np.array([0.0, *(decode_points[h] for h in sorted(decode_points))])

    def decode(h: np.ndarray | float) -> np.ndarray:
        return np.interp(h, heights, rates)

    return Rates(decode=decode, train=train, max_concurrency=int(heights[-1]), source="measured")


def assumed_rates(
    cfg: Config, shape: ModelShape, gpu: Gpu, lengths: Lengths, *, prompt_tokens: float, ranks: int
) -> Rates:
    """Rates of the roofline.

    Args:
        lengths: of completions.
        ranks: devices of a server.

    Raises:
        ValueError: a server cannot hold the weights and one sequence.
    """
    context = mean_context(lengths, prompt_tokens)
    cache = kv_cache_bytes(cfg, shape, "actor_llm", ranks, gpu.memory)
    most = int(cache / (shape.kv_bytes_per_token() * context))
    if not most:
        raise ValueError(
            f"a server of {ranks} GPU(s) of {gpu.memory / 1e9:.0f} GB cannot hold "
            f"{shape.parameters / 1e9:.1f}B parameters and one sequence: use more GPUs per server (--gpus-per-llm)"
        )
    longest = document_tokens(cfg, prompt_tokens + lengths.longest)
    return Rates(
        decode=partial(decode_rate, shape, gpu, context=context, ranks=ranks),
        train=_planned_rate(cfg, shape, gpu, longest),
        max_concurrency=most,
        source="assumed",
    )


def mean_context(lengths: Lengths, prompt_tokens: float) -> float:
    """Mean tokens in the cache of a sequence that is decoding."""
    return prompt_tokens + lengths.mean_square / (2 * lengths.mean)


def document_tokens(cfg: Config, longest: float) -> int:
    """Length for which attention is computed: the longest document, at most a micro-batch."""
    return min(cfg.finetune.seq_length, int(longest))


def decode_rate(
    shape: ModelShape, gpu: Gpu, sequences: np.ndarray | float, *, context: float, ranks: int
) -> np.ndarray:
    """tokens/s of one device that decodes this number of sequences at a time, of ``context`` tokens each on average.

    A step reads the weights and every sequence's cache, and computes 2 FLOP per parameter and sequence, while the host
    schedules the server's sequences.
    ``ranks``: devices over which a server's weights are divided.
    """
    h = np.asarray(sequences, dtype=np.float64)
    read_bytes = 2 * shape.parameters / ranks + h * shape.kv_bytes_per_token() * context
    reading = read_bytes / (DECODE_BANDWIDTH_EFFICIENCY * gpu.bandwidth)
    computing = DECODED_FLOPS * shape.active_parameters * h / (DECODE_COMPUTE_EFFICIENCY * gpu.flops)
    return h / np.maximum(np.maximum(reading, computing), SEQUENCE_HOST_S * ranks * h)


def training_flops(shape: ModelShape, tokens: int, *, recomputed: float, frozen: bool = False) -> float:
    """Operations that the trainer executes per token of a document of ``tokens`` tokens.

    Attention: 2 products of 2·D operations per head, query and key, half of the keys on average.
    ``recomputed``: share of the layers that are computed again.
    ``frozen``: an adapter is trained, whose own operations are left out. The weights have no gradient.
    """
    attention = 2 * tokens * shape.layers * shape.heads * shape.head_dim
    forward = 2 * shape.active_parameters + attention
    return (3 + recomputed) * forward - (2 * shape.active_parameters if frozen else 0)


def training_rate(shape: ModelShape, gpu: Gpu, tokens: int, *, recomputed: float, frozen: bool = False) -> float:
    """tokens/s of one device with documents of ``tokens`` tokens."""
    return TRAIN_COMPUTE_EFFICIENCY * gpu.flops / training_flops(shape, tokens, recomputed=recomputed, frozen=frozen)


def _planned_rate(cfg: Config, shape: ModelShape, gpu: Gpu, tokens: int) -> float:
    recomputed = recomputed_layers(cfg, shape) / shape.layers
    return training_rate(shape, gpu, tokens, recomputed=recomputed, frozen=cfg.finetune.lora.enabled)


def trainer_speed(cfg: Config, shape: ModelShape, gpu: Gpu, ranks: int) -> RoleSpeed:
    longest = document_tokens(cfg, PROMPT_TOKENS + int(cfg.llm.parameters["max_tokens"]))
    dividing = cfg.finetune.expert_ranks or 1
    each = _planned_rate(cfg, shape, gpu, longest)
    if cfg.finetune.cpu_offload is True:
        # A float32 shard comes to the GPU for the forward pass and again for the backward pass, while others compute.
        copied = 2 * 4 * shape.parameters / (cfg.finetune.shard_ranks or ranks)
        each = min(each, cfg.finetune.seq_length * HOST_BYTES_PER_S / copied)
    return RoleSpeed(
        kind="finetune",
        devices=ranks,
        tokens_per_s=ranks * each,
        mfu=TRAINED_FLOPS * shape.active_parameters * each / gpu.flops,
        note=f"documents of {longest} tokens"
        + (", without the exchange of tokens" if dividing > 1 else "")
        + (", without the optimizer's step in host memory" if cfg.finetune.cpu_offload is True else ""),
    )


def assumed_lengths(cfg: Config) -> Lengths:
    """Lengths of completions where none are given."""
    longest = int(cfg.llm.parameters["max_tokens"])
    return Lengths.lognormal(MEAN_SHARE * longest, longest)


def server_speed(cfg: Config, shape: ModelShape, gpu: Gpu, num_servers: int, gpu_bytes: int) -> RoleSpeed | None:
    """Decoding with as many sequences as the KV cache and `actor.llm_max_rollouts` allow. None: not one fits."""
    ranks, context = devices_per_server(cfg), mean_context(assumed_lengths(cfg), PROMPT_TOKENS)
    cache = ranks * kv_cache_bytes(cfg, shape, "actor_llm", ranks, gpu_bytes)
    allowed = cfg.vllm_config.vllm_kwargs.get("max-num-seqs")
    most = min(most_rollouts(cfg), allowed) if isinstance(allowed, int) else most_rollouts(cfg)
    sequences = min(int(cache / (shape.kv_bytes_per_token() * context)), most)
    if not sequences:
        return None
    each = float(decode_rate(shape, gpu, sequences / ranks, context=context, ranks=ranks))
    return RoleSpeed(
        kind="actor_llm",
        devices=ranks * num_servers,
        tokens_per_s=each * ranks * num_servers,
        mfu=DECODED_FLOPS * shape.active_parameters * each / gpu.flops,
        note=f"{sequences} sequences at a time per server, {context:.0f} tokens each on average",
    )


def predicted_speed(cfg: Config, world: WorldMap, shape: ModelShape, gpu: Gpu, gpu_bytes: int) -> tuple[RoleSpeed, ...]:
    """Speed of the trainer and of the policy's servers. Jobs that share a GPU have half of its time each."""
    share, ranks = 0.5 if world.share_devices else 1.0, world.trainer_world_size
    servers = world.get("actor_llm")
    found = [trainer_speed(with_choices(cfg, shape, ranks, gpu_bytes), shape, gpu, ranks)]
    if servers and (decoding := server_speed(cfg, shape, gpu, len(servers), gpu_bytes)) is not None:
        found.append(decoding)
    return tuple(
        msgspec.structs.replace(speed, tokens_per_s=share * speed.tokens_per_s, mfu=share * speed.mfu)
        for speed in found
    )


def checkpoint_tensors(shape: ModelShape) -> int:
    """Tensors of a model of Qwen's kind: 9 of a layer beside its feed-forward network, and 3 of each expert."""
    return shape.layers * (9 + 3 * shape.experts) + 3


def sent_tensors(cfg: Config, shape: ModelShape) -> int:
    """Tensors of a weight update: A and B of a layer's seven matrices (3 of each expert), or the checkpoint's."""
    return shape.layers * 2 * (4 + 3 * shape.experts) if sends_adapter(cfg) else checkpoint_tensors(shape)


def predicted_pause_s(cfg: Config, shape: ModelShape, gpu: Gpu, ranks: int, gpu_bytes: int) -> float:
    """Seconds for which a weight update stops a server's decoding, where it is staged as planned."""
    staged = staged_bytes(cfg, shape, ranks)
    is_near = cfg.world.share_devices or fits_on_device(staged, int(gpu_bytes * (1 - utilization(cfg))), "nccl")
    return pause_s(staged, sent_tensors(cfg, shape), COPY_SHARE * gpu.bandwidth if is_near else HOST_BYTES_PER_S)


def pause_s(num_bytes: float, tensors: int, bytes_per_s: float) -> float:
    """Seconds in which decoding stands still for the swap, after the step under way (docs/algorithms.md §11).

    Args:
        num_bytes: what one worker stages.
        tensors: copies that it makes, about one for each tensor sent.
        bytes_per_s: at which staged bytes are read and written where the model is.
    """
    return max(num_bytes / bytes_per_s, tensors * COPY_S)


def communicators(servers: int) -> int:
    """Most NCCL communicators of a worker: with the trainer's ranks, to a server, from a server."""
    return COMMUNICATORS if servers > 1 else 1
