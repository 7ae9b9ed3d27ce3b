"""Estimates what one trainer rank holds at the peak of an optimizer step, from the configuration and the model.

A step has four moments at which the memory may be largest: the output head at the end of a forward pass, the backward
pass through a layer, the reduction of a layer's gradient, and the optimizer's step. At the first two, the activations
that are kept for the other layers are there, at the third all but one layer's, at the fourth none. The plan is the
largest one. `benchmarks/step_memory.py` compares it with measured allocations.

Bytes per parameter P (N ranks, float32 master weights everywhere):

    ddp       16 P               weights, gradient, two Adam moments in float32
    fsdp2     12 P / N + 4 P     sharded, but the gradient is whole until the step's one synchronisation
              16 P / N           with `finetune.shard_gradients`
    deepspeed bf16  2 P + 2 P + 12 P  stage 1 shards the 12 P, stage 2 also the gradient (then 4 P), stage 3 all
              fp32  4 P + 4 P + 12 P  sharded in the same way: DeepSpeed keeps master weights here too

With LoRA the weights count as a whole, and gradient and optimizer states count only for the adapters. Frozen norms keep
no normalised input, the head has no gradient, and autocast copies a frozen weight anew each time. Ranks that share
a micro-batch have their part of its activations, and each layer's keys and values as a whole.

Shapes: T tokens of a micro-batch, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import msgspec

from pipelinerl.config.engine import zero_settings, zero_stage
from pipelinerl.config.sections import Config
from pipelinerl.world.model_shape import ModelShape

GIB = 2**30
RUNTIME_BYTES = 2 * GIB
"""CUDA context, communication buffers, fragmentation."""
SMALLEST_CHUNK = 256
"""Of `finetune.head_chunk_tokens=auto`."""
ZERO_BUCKET, ZERO_LIVE, ZERO_SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000
ZERO_LIVE_KEYS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
"""DeepSpeed's defaults, in parameters."""


class MemoryItem(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per element."""

    computed: int
    """Of matrix products."""
    stream: int
    """Of the residual stream. Autocast keeps it in float32."""
    autocast: bool
    """Whether float32 weights are copied to bfloat16 for the products."""

    @classmethod
    def of(cls, cfg: Config, engine: str) -> "Precision":
        half = cfg.finetune.dtype == "bfloat16"
        autocast = half and engine == "ddp"
        return cls(computed=2 if half else 4, stream=4 if autocast or not half else 2, autocast=autocast)


def state_bytes(
    parameters: int,
    *,
    engine: str,
    stage: int,
    ranks: int,
    half: bool,
    trained: int | None = None,
    shard_gradients: bool = False,
) -> tuple[int, int, int]:
    """Bytes of weights, gradient, and optimizer states with master weights on one rank.

    Args:
        stage: DeepSpeed's ZeRO stage.
        half: whether the trainer's weights are bfloat16.
        trained: number of trained parameters. None = all.
        shard_gradients: `finetune.shard_gradients`.
    """
    if engine == "deepspeed":
        weights, gradient, states = (2, 4 if stage > 1 else 2, 12) if half else (4, 4, 12)
        sharded = (stage >= 3, stage >= 2, stage >= 1)
    else:
        weights, gradient, states = 4, 4, 8
        sharded = (engine == "fsdp2", engine == "fsdp2" and shard_gradients, engine == "fsdp2")
    learning = parameters if trained is None else trained
    parts = [ranks if shard else 1 for shard in sharded]
    return weights * parameters // parts[0], gradient * learning // parts[1], states * learning // parts[2]


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Number of adapter parameters on all linear layers of the decoder: rank × (inputs + outputs) for each layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return shape.layers * rank * (attention + 3 * shape.experts * (shape.hidden + shape.intermediate))


def layer_bytes_per_token(shape: ModelShape, precision: Precision, frozen: bool = False) -> int:
    """What autograd keeps of one layer for the backward pass.

    Norms compute in float32. Per norm they keep their input and the normalised input, and the linear layers behind it
    keep their inputs. Autocast makes a copy for each of these layers. Attention keeps queries, keys, values and its
    output twice, once for the product behind it, and the log-sum-exp. The feed-forward network keeps both products, the
    activation and their product.

    ``frozen``: with adapters, for which nothing is kept of the norms' gradients.
    """
    e, hidden = precision.computed, shape.hidden
    norms = (2 * (4 + 4) + 5 * e) * hidden if precision.autocast else 2 * (4 + 2 * e) * hidden
    norms -= 2 * (4 if precision.autocast else e) * hidden if frozen else 0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = e * (3 * queries + 2 * keys) + 4 * shape.heads
    if shape.experts > 1:
        visited = shape.active_experts * (2 * hidden + 4 * shape.intermediate) + 4 * shape.shared_intermediate
    else:
        visited = 4 * shape.intermediate
    return norms + attention + e * visited


def embedding_parameters(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def layer_parameters(shape: ModelShape) -> int:
    return (shape.parameters - embedding_parameters(shape)) // shape.layers


def weight_copies(cfg: Config, shape: ModelShape, engine: str, ranks: int) -> int:
    """Bytes of whole weights that exist besides the rank's own, in the precision of the products.

    Autocast copies every linear layer. FSDP2 gathers embedding and head for the whole step, and two layers at a time.
    ZeRO-3 gathers up to `stage3_max_live_parameters` ahead, and keeps what is used again within
    `stage3_max_reuse_distance`. The backward pass uses no frozen embedding again. One rank alone has nothing to gather.
    """
    precision, embeddings = Precision.of(cfg, engine), embedding_parameters(shape)
    layer = layer_parameters(shape)
    if precision.autocast:
        passing = cfg.finetune.lora.enabled and cfg.finetune.gradient_checkpointing
        return precision.computed * (layer if passing else shape.parameters - embeddings)
    if engine == "fsdp2":
        return precision.computed * (embeddings + 2 * layer)
    if engine == "deepspeed" and zero_stage(cfg) == 3 and ranks > 1:
        live = max(int(zero_settings(cfg).get(key, ZERO_LIVE)) for key in ZERO_LIVE_KEYS)
        unused = shape.vocab * shape.hidden if cfg.finetune.lora.enabled and not shape.tied else 0
        return precision.computed * min(max(live, embeddings), shape.parameters - unused)
    return 0


def zero_buckets(cfg: Config) -> int:
    """Bytes of DeepSpeed's buffers in which gradients are reduced: two with `overlap_comm`, but one in stage 3."""
    settings = zero_settings(cfg)
    size = int(settings.get("reduce_bucket_size", ZERO_BUCKET))
    count = 2 if settings.get("overlap_comm") and zero_stage(cfg) < 3 else 1
    return count * (2 if cfg.finetune.dtype == "bfloat16" else 4) * size


def head_bytes(cfg: Config, shape: ModelShape, engine: str, tokens: int, *, cuda: bool) -> int:
    """Bytes of the output head: rounded operands, its float32 gradient, the logits of a chunk, and its states.

    CUDA multiplies bfloat16 operands into float32, and rounds the logits' gradient for it. A CPU widens the operands.
    When the logits are gone, the gradient of bfloat16 weights is rounded.
    """
    precision = Precision.of(cfg, engine)
    half, matrix, states = precision.computed == 2, shape.vocab * shape.hidden, tokens * shape.hidden
    chunk = cfg.finetune.head_chunk_tokens
    logits = min(SMALLEST_CHUNK if chunk == "auto" else chunk, tokens) * shape.vocab * (10 if half and cuda else 8)
    rounding = 2 * matrix if half and not precision.autocast and not cfg.finetune.lora.enabled else 0
    rounded = 2 * matrix if precision.autocast else 0
    operands = 0 if not half else rounded if cuda else 4 * (matrix + states)
    gradient = 0 if cfg.finetune.lora.enabled else 4 * matrix
    return gradient + operands + max(logits, rounding) + states * (4 + 2 * precision.computed + 2 * precision.stream)


def reduction_bytes(cfg: Config, shape: ModelShape, engine: str, trained: float) -> int:
    """Bytes of FSDP2's reduction of a layer's gradient: the gradient as computed, in float32, and the layer before.

    ``trained``: share of the parameters.
    """
    return int(trained * layer_parameters(shape) * (Precision.of(cfg, engine).computed + 8)) if engine == "fsdp2" else 0


def second_gradient_bytes(cfg: Config, engine: str, learning: int, ranks: int) -> int:
    """Bytes of the buffer in which ZeRO-2 in float32 collects a micro-batch's gradient beside the sum of earlier ones.

    It makes the buffer when the first bucket is full. Smaller models fill one only after the backward pass.
    """
    if engine != "deepspeed" or zero_stage(cfg) != 2 or cfg.finetune.dtype == "bfloat16":
        return 0
    bucket = int(zero_settings(cfg).get("reduce_bucket_size", ZERO_BUCKET))
    return 4 * learning // ranks if learning > bucket else 0


def stepping_bytes(cfg: Config, engine: str, learning: int, ranks: int) -> int:
    """Bytes of the copies of a rank's gradient in the optimizer's step: of the `learning` parameters of all ranks.

    ZeRO-1 flattens it and then widens it. ZeRO-2 holds it flat in bfloat16, and flattens it in float32. ZeRO-3 flattens
    and steps with one sub-group at a time.
    """
    stage, half = zero_stage(cfg), cfg.finetune.dtype == "bfloat16"
    if engine != "deepspeed" or (stage == 2 and half):
        return 0
    if stage < 3:
        return (2 + 4 if half else 4) * learning // ranks
    return 4 * min(learning // ranks, int(zero_settings(cfg).get("sub_group_size", ZERO_SUB_GROUP)))


def step_items(cfg: Config, shape: ModelShape, engine: str, ranks: int, *, cuda: bool = True) -> tuple[MemoryItem, ...]:
    """What comes and goes in an optimizer step, at its peak.

    Args:
        engine: `ddp`, `fsdp2` or `deepspeed`.
        ranks: of the trainer.
        cuda: whether the device is a GPU.
    """
    learning = lora_parameters(shape, cfg.finetune.lora.r) if cfg.finetune.lora.enabled else shape.parameters
    items = passing_items(cfg, shape, engine, ranks, learning=learning, cuda=cuda)
    stepping = stepping_bytes(cfg, engine, learning, ranks)
    if stepping > sum(item.num_bytes for item in items):
        items = (MemoryItem(label="optimizer's copies of the gradient", num_bytes=stepping),)
    if engine == "deepspeed":
        items += (MemoryItem(label="reduction buckets", num_bytes=zero_buckets(cfg)),)
    return items


def passing_items(
    cfg: Config, shape: ModelShape, engine: str, ranks: int, *, learning: int, cuda: bool
) -> tuple[MemoryItem, ...]:
    """What comes and goes in the forward and backward passes. ``learning``: number of trained parameters."""
    finetune, precision = cfg.finetune, Precision.of(cfg, engine)
    second = second_gradient_bytes(cfg, engine, learning, ranks)
    tokens = finetune.seq_length // finetune.seq_parallel
    gathered = 2 * shape.kv_heads * shape.head_dim * (finetune.seq_length - tokens)
    per_token = layer_bytes_per_token(shape, precision, finetune.lora.enabled)
    layer = tokens * per_token + precision.computed * gathered
    kept = tokens * precision.stream * shape.hidden if finetune.gradient_checkpointing else layer
    width = shape.active_experts * shape.intermediate + shape.shared_intermediate
    products = 2 * precision.computed * max(width, shape.hidden) + precision.stream * shape.hidden
    gradients = tokens * products + 4 * gathered
    moments = (
        ("output head", head_bytes(cfg, shape, engine, tokens, cuda=cuda)),
        ("one layer's backward pass", second + gradients + (layer if finetune.gradient_checkpointing else 0)),
        ("reduction of a layer's gradient", reduction_bytes(cfg, shape, engine, learning / shape.parameters) - kept),
    )
    label, num_bytes = max(moments, key=lambda moment: moment[1])
    return (
        MemoryItem(label=f"kept activations ({tokens} tokens)", num_bytes=shape.layers * kept),
        MemoryItem(label=label, num_bytes=num_bytes),
        MemoryItem(label="whole copies of weights", num_bytes=weight_copies(cfg, shape, engine, ranks)),
    )
