"""Predicted tokens/s and MFU of trainer and servers, for the dry run. Pure; nothing here was measured.

A roofline over the data sheet of the GPU (`rates`). The trainer's operations are those of the parameters (forward,
backward, and once more with gradient checkpointing) and of causal attention over whole micro-batches. Selective
checkpointing counts like the other: it computes less again, but took as long on an H200, because of Python. MFU counts
only 6 operations per active parameter and trained token, or 2 per decoded one (arXiv:2204.02311), so that recomputation
and attention lower it. `pipelinerl gpu-check` compares the prediction with a card.
"""

import msgspec

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import devices_per_server, most_rollouts, sends_adapter
from pipelinerl.plan.lengths import Lengths
from pipelinerl.plan.memory import kv_cache_bytes, staged_bytes, utilization, with_choices
from pipelinerl.plan.model_shape import ModelShape
from pipelinerl.plan.rates import GPUS, TRAIN_COMPUTE_EFFICIENCY, Gpu, decode_rate
from pipelinerl.plan.update_time import SwapSpeed, pause_s
from pipelinerl.weights.staging_memory import fits_on_device
from pipelinerl.world.map import WorldMap

ASSUMED_GPU = "H100"
TRAINED_FLOPS, DECODED_FLOPS = 6, 2
"""Operations per parameter and token that count as useful."""
MEAN_SHARE = 0.3
"""Mean length of a completion as a share of `max_tokens`, as `pipelinerl plan` assumes it."""
PROMPT_TOKENS = 500
COPY_SHARE = 0.39
"""Speed of a copy within a GPU over its bandwidth: 1.3 of 3.35 TB/s on an H100, as in `update_time`."""
HOST_BYTES_PER_S = 50e9
"""From pinned host memory to a GPU, over PCIe 5."""


class RoleSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of job is predicted to do."""

    kind: str
    devices: int
    tokens_per_s: float
    """Of all devices together."""
    mfu: float
    note: str


def gpu_named(name: str | None) -> tuple[str, Gpu]:
    """Name and data sheet of the GPU that CUDA calls ``name``. None or unknown: `ASSUMED_GPU`."""
    found = next((key for key in GPUS if name is not None and key in name), ASSUMED_GPU)
    return found, GPUS[found]


def training_flops(shape: ModelShape, tokens: int, *, recomputed: bool) -> float:
    """Operations that the trainer executes per token of a document of ``tokens`` tokens.

    Attention: 2 products of 2·D operations per head, query and key, half of the keys on average.
    """
    passes = 4 if recomputed else 3
    attention = 2 * tokens * shape.layers * shape.heads * shape.head_dim
    return passes * (2 * shape.active_parameters + attention)


def training_rate(shape: ModelShape, gpu: Gpu, tokens: int, *, recomputed: bool) -> float:
    """tokens/s of one device with micro-batches of ``tokens`` tokens."""
    return TRAIN_COMPUTE_EFFICIENCY * gpu.flops / training_flops(shape, tokens, recomputed=recomputed)


def trainer_speed(cfg: Config, shape: ModelShape, gpu: Gpu, ranks: int) -> RoleSpeed:
    """Documents are assumed as long as a prompt and a longest completion, at most a micro-batch."""
    longest = min(cfg.finetune.seq_length, PROMPT_TOKENS + int(cfg.llm.parameters["max_tokens"]))
    dividing = cfg.finetune.expert_ranks or 1
    each = training_rate(shape, gpu, longest, recomputed=cfg.finetune.gradient_checkpointing is not False)
    return RoleSpeed(
        kind="finetune",
        devices=ranks,
        tokens_per_s=ranks * each,
        mfu=TRAINED_FLOPS * shape.active_parameters * each / gpu.flops,
        note=f"documents of {longest} tokens"
        + (", without the exchange of tokens" if dividing > 1 else "")
        + (", without the traffic to host memory" if cfg.finetune.cpu_offload is True else ""),
    )


def server_speed(cfg: Config, shape: ModelShape, gpu: Gpu, num_servers: int, gpu_bytes: int) -> RoleSpeed | None:
    """Decoding with as many sequences as the KV cache and `actor.llm_max_rollouts` allow. None: not one fits."""
    ranks, longest = devices_per_server(cfg), int(cfg.llm.parameters["max_tokens"])
    lengths = Lengths.lognormal(MEAN_SHARE * longest, longest)
    context = PROMPT_TOKENS + lengths.mean_square / (2 * lengths.mean)
    cache = ranks * kv_cache_bytes(cfg, shape, "actor_llm", ranks, gpu_bytes)
    sequences = min(int(cache / (shape.kv_bytes_per_token() * context)), most_rollouts(cfg))
    if not sequences:
        return None
    each = float(decode_rate(shape, gpu, sequences / ranks, mean_context=context, devices_per_server=ranks))
    return RoleSpeed(
        kind="actor_llm",
        devices=ranks * num_servers,
        tokens_per_s=each * ranks * num_servers,
        mfu=DECODED_FLOPS * shape.active_parameters * each / gpu.flops,
        note=f"{sequences} sequences at a time per server, {context:.0f} tokens each on average",
    )


def checkpoint_tensors(shape: ModelShape) -> int:
    """Tensors of a model of Qwen's kind: 9 of a layer beside its feed-forward network, and 3 of each expert."""
    return shape.layers * (9 + 3 * shape.experts) + 3


def sent_tensors(cfg: Config, shape: ModelShape) -> int:
    """Tensors of a weight update: A and B of a layer's seven matrices (3 of each expert), or the checkpoint's."""
    return shape.layers * 2 * (4 + 3 * shape.experts) if sends_adapter(cfg) else checkpoint_tensors(shape)


def predicted_pause_s(cfg: Config, shape: ModelShape, gpu: Gpu, ranks: int, gpu_bytes: int) -> float:
    """Seconds for which a weight update stops a server's decoding, where it is staged as planned.

    Args:
        ranks: devices of the server.
    """
    staged = staged_bytes(cfg, shape, ranks)
    is_near = cfg.world.share_devices or fits_on_device(staged, int(gpu_bytes * (1 - utilization(cfg))), "nccl")
    rate = COPY_SHARE * gpu.bandwidth if is_near else HOST_BYTES_PER_S
    return pause_s(staged, sent_tensors(cfg, shape), SwapSpeed(bytes_per_s=rate))


def predicted_speed(cfg: Config, world: WorldMap, shape: ModelShape, gpu: Gpu, gpu_bytes: int) -> tuple[RoleSpeed, ...]:
    """Of the trainer and of the policy's servers. Jobs that share a GPU have half of its time each."""
    share, ranks = 0.5 if world.share_devices else 1.0, world.trainer_world_size
    servers = world.get("actor_llm")
    found = [trainer_speed(with_choices(cfg, shape, ranks, gpu_bytes), shape, gpu, ranks)]
    if servers and (decoding := server_speed(cfg, shape, gpu, len(servers), gpu_bytes)) is not None:
        found.append(decoding)
    return tuple(
        msgspec.structs.replace(speed, tokens_per_s=share * speed.tokens_per_s, mfu=share * speed.mfu)
        for speed in found
    )
