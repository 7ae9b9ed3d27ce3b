"""Sections of the trainer: batches, optimizer, engine, adapters, objective."""

from typing import Any, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pipelinerl.config.backends import ENGINE_PATTERN
from pipelinerl.config.keys import Section, key
from pipelinerl.config.objectives import ADVANTAGES, POLICY_LOSSES, names
from pipelinerl.records import BatchUnit


class RLSection(Section):
    """The objective. [algorithms.md](algorithms.md) has the formulas, the § of which the rows name.
    Files in `conf/finetune` combine them, e.g. `finetune=grpo`."""

    policy_loss: str = key("reinforce", f"{names(POLICY_LOSSES)} (§2)")
    policy_loss_kwargs: dict[str, Any] = key({}, "keyword arguments of a loss of yours")
    advantage: str = key("loo", f"{names(ADVANTAGES)} (§1)")
    advantage_kwargs: dict[str, Any] = key({}, "keyword arguments of an advantage of yours")
    reward_weights: dict[str, float] = key(
        {},
        "several rewards: metrics of the domain that are rewards, with their weights, e.g. `{correct: 1, style: 0.2}`. "
        "The advantage of each is taken on its own, and the weighted sum is trained (§1). Empty = the one `reward`",
    )
    step_discount: float = key(1.0, "factor per step in returns of rollouts with `rewards=steps` (§1)", gt=0, le=1)
    aggregation: Literal["sum_over_batch", "sum_over_texts", "token_mean", "sample_mean", "prompt_mean"] = key(
        "sum_over_batch", "§4"
    )
    proximal_every: PositiveInt | None = key(
        None,
        "steps that share one proximal policy, to which `ppo`, `gspo` and `decoupled_ppo` then take their ratio. Null "
        "= the sampler, or `steps_per_phase` for `decoupled_ppo`. With 1 the clip is idle (§2)",
    )
    ratio_clamp: PositiveFloat = key(5.0, "c of `reinforce`")
    epsilon_low: PositiveFloat = key(0.2, "lower clip of `ppo`, `gspo`, `decoupled_ppo`")
    epsilon_high: PositiveFloat = key(0.2, "upper clip")
    dual_clip: PositiveFloat = key(
        10.0, "`ppo`, `gspo`, `decoupled_ppo`: a token with A < 0 and a larger ratio has no gradient (§2)"
    )
    token_tis: PositiveFloat | None = key(None, "correction, bounds the weight at C. Null = off")
    sequence_tis: PositiveFloat | None = key(None, "the same with the sequence's ratio")
    token_mis: PositiveFloat | None = key(None, "correction, drops tokens with ρ beyond C. Null = off")
    token_mis_low: float | None = key(
        None, "with `token_mis`: drops tokens with ρ below this, too (IcePop: 0.5 and 5). Null = off", gt=0, lt=1
    )
    sequence_mis: PositiveFloat | None = key(None, "the same with the sequence's ratio")
    veto: float | None = key(None, "drop a sequence with any ρ below this (1e-4). Null = off", gt=0, lt=1)
    kl_coef: NonNegativeFloat = key(0.0, "weight of the KL term to the reference model (§3)")
    final_kl_coef: NonNegativeFloat = key("${finetune.rl.kl_coef}", "its value in the last step")
    kl_clamp: PositiveFloat = key(5.0, "bound on the log-ratio inside the KL term")
    teacher_coef: NonNegativeFloat = key(
        0.0, "weight of log π_teacher − log π of each token in its advantage (§3). Needs `teachers`"
    )
    teacher_top_k: NonNegativeInt = key(
        0,
        "most likely tokens of the teacher in each place, over which the divergence from it is computed instead of "
        "estimated by the sampled token (§3). Each costs 8 bytes per trained token in records",
        le=64,
    )
    reward_coef: NonNegativeFloat = key(1.0, "weight of the rewards' advantage beside it. 0 = the teacher alone")
    entropy_bonus: NonNegativeFloat = key(0.0, "weight of the entropy bonus")
    final_entropy_bonus: NonNegativeFloat = key("${finetune.rl.entropy_bonus}", "its value in the last step")
    value_loss_coef: NonNegativeFloat = key(0.0, "weight of the value loss. Only with `advantage: value`")
    filter_zero_advantage_groups: bool = key(
        False, "default of `preprocess.filter_zero_advantage_groups`, for recipes in `conf/finetune`"
    )
    no_positive_resampling: float | None = key(
        None, "success rate at which a problem leaves the pool (0.9). Null = never", gt=0, le=1
    )


class LoraSection(Section):
    """Low-rank adapters."""

    enabled: bool = key(False, "train low-rank adapters of a frozen base")
    send: Literal["adapter", "merged"] = key(
        "adapter",
        "what the servers are sent: `adapter` = the adapter alone, which vLLM adds to the base that it loaded. "
        "`merged` = all weights, for models and modules whose adapters vLLM does not serve ([guide](guides/lora.md))",
    )
    r: PositiveInt = key(16, "rank")
    alpha: PositiveInt = key(16, "scale: alpha / r")
    dropout: float = key(0.0, "on the adapters' input. Leave it 0, or trainer and server differ", ge=0, lt=1)
    target_modules: list[str] | str = key("all-linear", "peft's choice or a list of module names")


class OptimizerSection(Section):
    """The optimizer."""

    name: str = key(
        "adamw",
        "`adamw` (torch's, fused where it can be). `muon` (torch's) for the layers' matrices and AdamW for the rest, "
        "with `ddp` alone. Or the dotted name of a class: of torch (`torch.optim.SGD`), of bitsandbytes or torchao, "
        "which you install (`bitsandbytes.optim.AdamW8bit`), or of yours. Not with DeepSpeed",
    )
    kwargs: dict[str, Any] = key({}, "further arguments of a class, e.g. `{momentum: 0.9}`")
    betas: tuple[float, float] = key([0.9, 0.999], "decay rates of the moments, both in [0, 1)")
    eps: PositiveFloat = key(1.0e-8, "added to the root of the second moment")
    weight_decay: NonNegativeFloat = key(0.0, "decay of matrices")


MOST_SEEN = 8
"""A micro-batch has at most this many times ``seq_length`` tokens, a common prefix counted in every sequence."""
# Attention copies the keys of a prefix for every sequence, and records repeat its tokens.


class FinetuneSection(Section):
    """The trainer."""

    seq_length: PositiveInt = key(
        12000, "tokens of a packed micro-batch, and the longest sequence that can be trained. At least `max_model_len`"
    )
    seq_packing: bool = key(
        True,
        "pack sequences without padding. False = `train_batch_size` sequences per micro-batch, one per padded row, as "
        "models with recurrent or convolutional layers need",
    )
    share_prefixes: Literal["auto", "off"] = key(
        "auto",
        "compute once what sequences of a micro-batch have in common: the prompt of a problem's attempts, the history "
        "of an agent's turns. `seq_length` then bounds the computed tokens, and 8 × `seq_length` all, whose keys take "
        "memory. Auto = where documents are packed, but not with `seq_parallel`, `router_replay`, "
        "`attn_implementation`, adapters' dropout, or for sequences with images. Off = compute every sequence whole",
        may_change=True,
    )
    seq_parallel: PositiveInt = key(
        1,
        "ranks that share each packed micro-batch, each a part of every document. Groups never cross nodes",
        may_change=True,
    )
    train_batch_size: PositiveInt = key(
        1,
        "batch size = this × `gradient_accumulation_passes` rollouts. Leave it 1 with packing. Without packing it is "
        "the sequences per micro-batch",
    )
    gradient_accumulation_passes: PositiveInt = key(
        256, "batch size = this × `train_batch_size` rollouts, over all ranks"
    )
    batch_unit: BatchUnit = key(
        "rollouts",
        "what the batch size counts: `rollouts`, or their `texts`. A rollout's texts stay in one step: the batch ends "
        "with the rollout that fills it",
    )
    learning_rate: PositiveFloat = key(1.0e-6, "peak learning rate")
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"] = key(
        "cosine", "over `schedule_steps`"
    )
    schedule_steps: PositiveInt | None = key(
        None,
        "optimizer steps of the learning rate's schedule, where the run ends before it. Null = `max_train_steps`",
    )
    num_warmup_steps: NonNegativeInt = key(20, "optimizer steps of linear warm-up")
    optimizer: OptimizerSection
    gradient_clipping_threshold: PositiveFloat | None = key(1.0, "largest norm of the gradient. Null = no clipping")
    max_train_steps: PositiveInt = key(
        1000, "optimizer steps of the run. Raising it lets a finished run go on", may_change=True
    )
    weight_update_interval: PositiveInt = key(
        1, "optimizer steps per weight update. Also e.g. `2048 samples`, divided by the optimizer batch"
    )
    save_checkpoint_steps: PositiveInt = key(
        100,
        "optimizer steps per checkpoint and exported model. Training does not wait for them",
        may_change=True,
    )
    save_checkpoint_minutes: PositiveFloat | None = key(
        10.0, "a checkpoint in between when the newest is older. Null = never", may_change=True
    )
    keep_checkpoints: PositiveInt = key(2, "checkpoints kept. The newest is never deleted", may_change=True)
    keep_exports: PositiveInt | None = key(None, "exported models kept. Null = all", may_change=True)
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16",
        "data type of the computation. Master weights and optimizer are float32. `float16` (`ddp`, `fsdp2`) scales the "
        "loss, and skips a step whose gradient overflows ([§7](algorithms.md))",
    )
    head_chunk_tokens: PositiveInt | Literal["auto"] = key(
        "auto",
        "tokens whose logits exist at one time. Auto = 1024 or 512 where the planned memory of the GPU allows it, "
        "else 256",
        may_change=True,
    )
    gradient_checkpointing: Literal["selective", "auto"] | bool | PositiveInt = key(
        "auto",
        "recompute activations in the backward pass. True = of all layers, a number = of so many. `selective` keeps "
        "the results of matrix products and of attention, and recomputes what lies between them: more memory, and less "
        "to compute, but more work for Python. Auto = of as few layers as fit the planned memory of the GPU",
        may_change=True,
    )
    compile: bool = key(
        False,
        "compile the decoder layers with torch.compile, which fuses what lies between matrix products. Takes a minute "
        "at the start, and a C++ compiler (CPU) or Triton (GPU)",
        may_change=True,
    )
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"] = key(
        "auto",
        "attention of the trainer. Auto = each packed document by itself (torch's varlen kernel in bfloat16 on "
        "CUDA, sdpa elsewhere), without a mask of all tokens by all tokens. The start compares it with the model's own "
        "log-probs",
        may_change=True,
    )
    router_replay: bool = key(
        False,
        "mixture of experts: train each token with the experts that the server chose for it. Costs a byte or two per "
        "token, layer and chosen expert in every record",
        may_change=True,
    )
    engine: str = key(
        "auto",
        "`ddp`, `deepspeed`, `fsdp2`, or the dotted name of a class of yours ([guide](guides/engine.md)). auto = "
        "`deepspeed`, and `ddp` for one rank. PipelineRL's `use_deepspeed` and `use_fsdp` choose it, too",
        may_change=True,
        pattern=ENGINE_PATTERN,
    )
    shard_gradients: Literal["auto"] | bool = key(
        False,
        "fsdp2: keep only each rank's shard of the gradient. Large models fit, at the price of a reduction in every "
        "micro-batch instead of one per step. Auto = true where recomputation is not enough for the planned memory",
        may_change=True,
    )
    cpu_offload: Literal["auto"] | bool = key(
        False,
        "fsdp2: weights, gradient and optimizer states lie in host memory, and the optimizer steps there. A layer's "
        "weights come to the GPU when it computes. Auto = true where nothing else makes the planned memory fit",
        may_change=True,
    )
    shard_ranks: PositiveInt | None = key(
        None,
        "fsdp2: ranks that share one copy of the weights, a divisor of the trainer's ranks. Others hold further "
        "copies, and only gradients cross from copy to copy, e.g. from node to node (HSDP). Null = all ranks share one",
        may_change=True,
    )
    expert_ranks: PositiveInt | None = key(
        None,
        "fsdp2: ranks that divide the experts of each layer among them, a divisor of the experts and of the ranks that "
        "share a copy, e.g. the GPUs of a node. Tokens travel to their experts (expert parallelism). Null = every rank "
        "gathers all experts of a layer",
        may_change=True,
    )
    profile_steps: tuple[NonNegativeInt, NonNegativeInt] | None = key(
        None,
        "first and last optimizer step of Chrome traces in `profiles/`. E.g. `[10, 12]`: what trainer rank 0 and a "
        "policy server compute in these three steps",
        may_change=True,
    )
    lora: LoraSection
    rl: RLSection

    @property
    def recomputed_for(self) -> str | None:
        """The setting for which sequences compute a common prefix each by itself. None: they compute it once."""
        reasons = {
            "share_prefixes": self.share_prefixes == "off",
            "seq_packing": not self.seq_packing,
            "seq_parallel": self.seq_parallel > 1,
            "router_replay": self.router_replay,
            "attn_implementation": self.attn_implementation != "auto",
            "lora.dropout": self.lora.dropout > 0,
        }
        return next((f"finetune.{key}" for key, holds in reasons.items() if holds), None)

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences of a micro-batch compute a common prefix once."""
        return self.recomputed_for is None

    @property
    def most_seen(self) -> int:
        """Largest number of tokens of a packed micro-batch, a common prefix counted in every sequence."""
        return self.seq_length * (MOST_SEEN if self.shares_prefixes else 1)
