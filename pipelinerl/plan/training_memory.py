"""Estimates what one trainer rank holds at the peak of an optimizer step, from the configuration and the model.

The peak is in the output head, in the backward pass of a layer, in the reduction of its gradient, or in the optimizer's
step. docs/cluster.md has the bytes per parameter of each engine. `benchmarks/step_memory.py` compares the plan with
measured allocations. Shapes: T tokens of a micro-batch, H hidden size, V vocabulary.
"""

from dataclasses import dataclass

import msgspec

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.engine import engine_of, traits_of, zero_settings, zero_stage
from pipelinerl.config.sections import Config
from pipelinerl.plan.model_shape import ModelShape

GIB = 2**30
RUNTIME_BYTES = 2 * GIB
"""CUDA context, communication buffers, fragmentation."""
SMALLEST_CHUNK = 256
"""Tokens of `finetune.head_chunk_tokens=auto` where nothing larger surely fits."""
ZERO_BUCKET, ZERO_LIVE, ZERO_SUB_GROUP = 500_000_000, 1_000_000_000, 1_000_000_000
ZERO_LIVE_KEYS = ("stage3_max_live_parameters", "stage3_max_reuse_distance")
"""DeepSpeed's defaults, in parameters."""


class MemoryItem(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Number formats."""

    computed: int
    """Bytes in matrix products."""
    stream: int
    """Bytes in the residual stream, which autocast keeps in float32."""
    autocast: bool
    """Whether float32 weights are copied to bfloat16 for the products."""


class EngineMemory:
    """What a rank holds, as its engine decides. This class: everything replicated in float32, without autocast.

    An engine of one's own derives from it and names its class in `EngineTraits.memory`.

    Args:
        name: `finetune.engine`, for what is printed.
        ranks: of the trainer.
    """

    autocast = False
    """Whether bfloat16 is computed by autocast over float32 weights."""

    def __init__(self, cfg: Config, name: str, ranks: int):
        self.cfg, self.name, self.ranks = cfg, name, ranks
        self.half = cfg.finetune.dtype != "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def precision(self) -> Precision:
        autocast = self.half and self.autocast
        stream = 4 if autocast or not self.half else 2
        return Precision(computed=2 if self.half else 4, stream=stream, autocast=autocast)

    def state_bytes(self, parameters: int, trained: int | None = None) -> tuple[int, int, int]:
        """Bytes of weights, gradient, and optimizer states with master weights on one rank.

        Args:
            trained: number of trained parameters. None = all.
        """
        learning = parameters if trained is None else trained
        return 4 * parameters, 4 * learning, 8 * learning

    def weight_bytes(self, shape: ModelShape, trained: int | None = None) -> int:
        """Bytes of the weights on one rank, the first of ``state_bytes``, for an engine that holds some in bfloat16."""
        return self.state_bytes(shape.parameters, trained)[0]

    def gradient_bytes(self, shape: ModelShape, trained: int | None = None) -> int:
        """Bytes of the gradient on one rank, the second of ``state_bytes``, for an engine that divides experts."""
        return self.state_bytes(shape.parameters, trained)[1]

    def exchanged_bytes(self, shape: ModelShape, tokens: int) -> int:
        """Bytes of rows that travel to and from experts of other ranks in one layer."""
        return 0

    def host_bytes(self, parameters: int, trained: int | None = None) -> int:
        """Bytes of what ``state_bytes`` leaves out because it lies in host memory, on one rank."""
        return 0

    def whole_weights(self, shape: ModelShape) -> int:
        """Bytes of whole weights that exist besides the rank's own, in the precision of the products."""
        return 0

    def reduction_bytes(self, shape: ModelShape, trained: float) -> int:
        """Bytes of the reduction of a layer's gradient. ``trained``: share of the parameters."""
        return 0

    def second_gradient_bytes(self, learning: int) -> int:
        """Bytes of a micro-batch's gradient beside the sum of earlier ones. ``learning``: trained parameters."""
        return 0

    def stepping_bytes(self, learning: int) -> int:
        """Bytes of the copies of a rank's gradient in the optimizer's step: of the trained parameters of all ranks."""
        return 0

    def bucket_bytes(self) -> int:
        """Bytes of buffers in which gradients are reduced, for the whole step."""
        return 0


class ReplicatedMemory(EngineMemory):
    """`ddp`: autocast copies every linear layer to bfloat16."""

    autocast = True

    def weight_bytes(self, shape: ModelShape, trained: int | None = None) -> int:
        return super().weight_bytes(shape, trained) - narrowed_bytes(self.cfg, shape)

    def whole_weights(self, shape: ModelShape) -> int:
        if not self.precision.autocast or self.cfg.finetune.lora.enabled:
            return 0
        return self.precision.computed * (shape.parameters - embedding_parameters(shape))


class ShardedMemory(EngineMemory):
    """`fsdp2`. Ranks of several copies hold as much as those of one.

    Experts that ranks divide are sharded as finely as the rest in the end, but a rank gathers only those that it owns.
    """

    def __init__(self, cfg: Config, name: str, ranks: int):
        super().__init__(cfg, name, ranks)
        self.sharing, self.dividing = cfg.finetune.shard_ranks or ranks, cfg.finetune.expert_ranks or 1
        self.offloads, self.shards_gradients = cfg.finetune.cpu_offload is True, cfg.finetune.shard_gradients is True

    def __str__(self) -> str:
        if self.dividing == 1:
            return self.name
        return f"{self.name}, experts divided over {self.dividing} ranks that are assumed to get equally many tokens"

    def state_bytes(self, parameters: int, trained: int | None = None) -> tuple[int, int, int]:
        weights, gradient, states = super().state_bytes(parameters, trained)
        shares = self.sharing if self.shards_gradients else 1
        if self.offloads:  # a whole gradient goes to the host when all micro-batches have added to it
            return 0, 0 if self.shards_gradients else gradient, 0
        return weights // self.sharing, gradient // shares, states // self.sharing

    def host_bytes(self, parameters: int, trained: int | None = None) -> int:
        return sum(super().state_bytes(parameters, trained)) // self.sharing if self.offloads else 0

    def gradient_bytes(self, shape: ModelShape, trained: int | None = None) -> int:
        if self.shards_gradients or trained is not None:
            return super().gradient_bytes(shape, trained)
        return 4 * (shape.parameters - shape.expert_parameters + shape.expert_parameters // self.dividing)

    def weight_bytes(self, shape: ModelShape, trained: int | None = None) -> int:
        saved = 0 if self.offloads else narrowed_bytes(self.cfg, shape) // self.sharing
        return super().weight_bytes(shape, trained) - saved

    def exchanged_bytes(self, shape: ModelShape, tokens: int) -> int:
        """What a rank sends and what comes."""
        if self.dividing == 1:
            return 0
        return 2 * self.precision.computed * tokens * shape.active_experts * shape.hidden

    def gathered_layer(self, shape: ModelShape) -> int:
        """Parameters of a layer with the experts of one rank."""
        experts = shape.expert_parameters // shape.layers
        return layer_parameters(shape) - experts + experts // self.dividing

    def whole_weights(self, shape: ModelShape) -> int:
        """Embedding and head for the whole step, and two layers at a time. An offloaded shard comes in float32."""
        embedding, layers = embedding_parameters(shape), 2 * self.gathered_layer(shape)
        arriving = 4 * max(embedding, layers) // self.sharing if self.offloads else 0
        return self.precision.computed * (embedding + layers) + arriving

    def reduction_bytes(self, shape: ModelShape, trained: float) -> int:
        """The gradient as computed, in float32, and the layer before."""
        return int(trained * self.gathered_layer(shape) * (self.precision.computed + 8))


class ZeroMemory(EngineMemory):
    """`deepspeed`, with the stage and the sizes of the DeepSpeed file."""

    def __init__(self, cfg: Config, name: str, ranks: int):
        super().__init__(cfg, name, ranks)
        self.settings, self.stage = zero_settings(cfg), zero_stage(cfg)

    def __str__(self) -> str:
        return f"{self.name} stage {self.stage}"

    def state_bytes(self, parameters: int, trained: int | None = None) -> tuple[int, int, int]:
        weights, gradient, states = (2, 4 if self.stage > 1 else 2, 12) if self.half else (4, 4, 12)
        learning = parameters if trained is None else trained
        shares = [self.ranks if self.stage >= stage else 1 for stage in (3, 2, 1)]
        return weights * parameters // shares[0], gradient * learning // shares[1], states * learning // shares[2]

    def whole_weights(self, shape: ModelShape) -> int:
        """ZeRO-3 gathers up to `stage3_max_live_parameters` ahead, and keeps what is used again within
        `stage3_max_reuse_distance`. The backward pass uses no frozen embedding again. One rank has nothing to gather.
        """
        if self.stage != 3 or self.ranks == 1:
            return 0
        live = max(int(self.settings.get(key, ZERO_LIVE)) for key in ZERO_LIVE_KEYS)
        unused = shape.vocab * shape.hidden if self.cfg.finetune.lora.enabled and not shape.tied else 0
        return self.precision.computed * min(max(live, embedding_parameters(shape)), shape.parameters - unused)

    def second_gradient_bytes(self, learning: int) -> int:
        """ZeRO-2 in float32 makes this buffer when the first bucket is full.

        Smaller models fill one only after the backward pass.
        """
        if self.stage != 2 or self.half:
            return 0
        bucket = int(self.settings.get("reduce_bucket_size", ZERO_BUCKET))
        return 4 * learning // self.ranks if learning > bucket else 0

    def stepping_bytes(self, learning: int) -> int:
        """ZeRO-1 flattens the gradient and then widens it. ZeRO-2 holds it flat in bfloat16, and flattens it in
        float32. ZeRO-3 flattens and steps with one sub-group at a time.
        """
        if self.stage == 2 and self.half:
            return 0
        if self.stage < 3:
            return (2 + 4 if self.half else 4) * learning // self.ranks
        return 4 * min(learning // self.ranks, int(self.settings.get("sub_group_size", ZERO_SUB_GROUP)))

    def bucket_bytes(self) -> int:
        """Two buffers with `overlap_comm`, but one in stage 3."""
        size = int(self.settings.get("reduce_bucket_size", ZERO_BUCKET))
        count = 2 if self.settings.get("overlap_comm") and self.stage < 3 else 1
        return count * (2 if self.half else 4) * size


def engine_memory(cfg: Config, ranks: int) -> EngineMemory:
    """Return what is planned for the configured engine on this number of ranks.

    Raises:
        ConfigError: `finetune.engine` is no engine.
    """
    name = engine_of(cfg, ranks)
    return resolve_function(traits_of(name).memory)(cfg, name, ranks)


def narrowed_bytes(cfg: Config, shape: ModelShape) -> int:
    """Bytes that `ddp` and `fsdp2` save on a frozen base, whose layers they hold in half precision."""
    is_narrowed = cfg.finetune.lora.enabled and cfg.finetune.dtype != "float32"
    return 2 * (shape.parameters - embedding_parameters(shape)) if is_narrowed else 0


def lora_parameters(shape: ModelShape, rank: int) -> int:
    """Number of adapter parameters on all linear layers of the decoder: rank × (inputs + outputs) for each layer."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 2 * (shape.hidden + queries) + 2 * (shape.hidden + keys)
    return shape.layers * rank * (attention + 3 * shape.experts * (shape.hidden + shape.intermediate))


def layer_bytes_per_token(shape: ModelShape, precision: Precision, frozen: bool = False) -> int:
    """What autograd keeps of one layer for the backward pass.

    ``frozen``: with adapters, for which nothing is kept of the norms' gradients.
    """
    e, hidden = precision.computed, shape.hidden
    # Float32 norms keep input and normalised input. The 5 linear layers behind them keep inputs, autocast copies.
    norms = (2 * (4 + 4) + 5 * e) * hidden if precision.autocast else 2 * (4 + 2 * e) * hidden
    norms -= 2 * (4 if precision.autocast else e) * hidden if frozen else 0
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # The output is kept twice, once for the product behind it. The log-sum-exp is float32.
    attention = e * (3 * queries + 2 * keys) + 4 * shape.heads
    if shape.experts > 1:
        # The feed-forward network keeps both products, the activation and their product.
        visited = shape.active_experts * (2 * hidden + 4 * shape.intermediate) + 4 * shape.shared_intermediate
    else:
        visited = 4 * shape.intermediate
    return norms + attention + e * visited


def products_per_token(shape: ModelShape, precision: Precision, adapted: bool = False) -> int:
    """What selective checkpointing keeps of one layer: results of its matrix products and of attention.

    ``adapted``: with adapters, whose products have the same width.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.experts > 1:
        visited = shape.active_experts * (2 * shape.intermediate + shape.hidden)
        visited += 2 * shape.shared_intermediate + (shape.hidden if shape.shared_intermediate else 0)
    else:
        visited = 2 * shape.intermediate + shape.hidden
    products = queries + 2 * keys + shape.hidden + visited
    return precision.computed * (products * (2 if adapted else 1) + queries) + 4 * shape.heads


def recomputed_layers(cfg: Config, shape: ModelShape) -> int:
    """Number of layers, the first ones, whose activations the backward pass computes again."""
    wanted = cfg.finetune.gradient_checkpointing
    if wanted is False:
        return 0
    return shape.layers if isinstance(wanted, bool | str) else min(wanted, shape.layers)


def embedding_parameters(shape: ModelShape) -> int:
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def layer_parameters(shape: ModelShape) -> int:
    return (shape.parameters - embedding_parameters(shape)) // shape.layers


def head_bytes(cfg: Config, shape: ModelShape, precision: Precision, tokens: int, *, cuda: bool) -> int:
    """Bytes of the output head: rounded operands, its float32 gradient, the logits of a chunk, and its states."""
    half, matrix, states = precision.computed == 2, shape.vocab * shape.hidden, tokens * shape.hidden
    chunk = cfg.finetune.head_chunk_tokens
    logits = min(SMALLEST_CHUNK if chunk == "auto" else chunk, tokens) * shape.vocab * (10 if half and cuda else 8)
    # When the logits are gone, the gradient of bfloat16 weights is rounded.
    rounding = 2 * matrix if half and not precision.autocast and not cfg.finetune.lora.enabled else 0
    rounded = 2 * matrix if precision.autocast else 0
    # CUDA multiplies bfloat16 operands into float32. A CPU widens them.
    operands = 0 if not half else rounded if cuda else 4 * (matrix + states)
    gradient = 0 if cfg.finetune.lora.enabled else 4 * matrix
    return gradient + operands + max(logits, rounding) + states * (4 + 2 * precision.computed + 2 * precision.stream)


def step_items(shape: ModelShape, memory: EngineMemory, *, cuda: bool = True) -> tuple[MemoryItem, ...]:
    """What comes and goes in an optimizer step, at its peak. ``cuda``: whether the device is a GPU."""
    lora = memory.cfg.finetune.lora
    learning = lora_parameters(shape, lora.r) if lora.enabled else shape.parameters
    items = passing_items(shape, memory, learning=learning, cuda=cuda)
    stepping, buckets = memory.stepping_bytes(learning), memory.bucket_bytes()
    if stepping > sum(item.num_bytes for item in items):
        items = (MemoryItem(label="optimizer's copies of the gradient", num_bytes=stepping),)
    return (*items, MemoryItem(label="reduction buckets", num_bytes=buckets)) if buckets else items


def passing_items(shape: ModelShape, memory: EngineMemory, *, learning: int, cuda: bool) -> tuple[MemoryItem, ...]:
    """What comes and goes in the forward and backward passes. ``learning``: number of trained parameters."""
    finetune, precision = memory.cfg.finetune, memory.precision
    tokens = finetune.seq_length // finetune.seq_parallel
    gathered = 2 * shape.kv_heads * shape.head_dim * (finetune.most_seen - tokens)
    per_token = layer_bytes_per_token(shape, precision, finetune.lora.enabled)
    layer = tokens * per_token + precision.computed * gathered
    entering, again, recomputed = tokens * precision.stream * shape.hidden, layer, recomputed_layers(memory.cfg, shape)
    if finetune.gradient_checkpointing == "selective":
        products = tokens * products_per_token(shape, precision, finetune.lora.enabled)
        entering, again = entering + products, max(layer - products, 0)
    kept = recomputed * entering + (shape.layers - recomputed) * layer
    last = entering
    # The backward pass frees the last layers first, which leaves room for one that is computed again.
    if recomputed < shape.layers:
        last, again = layer, 0
    width = shape.active_experts * shape.intermediate + shape.shared_intermediate
    products = 2 * precision.computed * max(width, shape.hidden) + precision.stream * shape.hidden
    exchanged = memory.exchanged_bytes(shape, tokens)
    backward = memory.second_gradient_bytes(learning) + tokens * products + 4 * gathered + exchanged
    moments = (
        ("output head", head_bytes(memory.cfg, shape, precision, tokens, cuda=cuda)),
        ("one layer's backward pass", backward + again),
        ("reduction of a layer's gradient", memory.reduction_bytes(shape, learning / shape.parameters) - last),
    )
    label, num_bytes = max(moments, key=lambda moment: moment[1])
    return (
        MemoryItem(label=f"kept activations ({tokens} tokens)", num_bytes=kept),
        MemoryItem(label=label, num_bytes=num_bytes),
        MemoryItem(label="whole copies of weights", num_bytes=memory.whole_weights(shape)),
    )
