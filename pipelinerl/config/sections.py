"""The typed mirror of ``conf/``: one class per section, bounds in the types, defaults only in the YAML files.

A key that is not here is refused. What a key means is said once, in ``conf/base.yaml`` beside its default.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

Fraction = NonNegativeInt


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LLMSection(Section):
    parameters: dict[str, Any]
    chat_template_kwargs: dict[str, Any]
    tool_parser: str | None


class ActorSection(Section):
    rollout_policy: str
    system_prompt: str | None
    task_template: str = Field(pattern=r"\{task\}")
    discount_factor: float = Field(gt=0, le=1)
    llm_max_rollouts: PositiveInt
    rollout_workers: PositiveInt
    rollout_timeout_s: PositiveFloat
    request_timeout_s: PositiveFloat
    max_request_retries: NonNegativeInt
    max_failed_rollouts_per_group: NonNegativeInt
    max_group_reissues: NonNegativeInt
    max_domain_errors: NonNegativeInt
    log_every_s: PositiveFloat


class EvalSection(Section):
    at_start: bool
    at_end: bool
    attempts: PositiveInt
    timeout_s: PositiveFloat
    max_problems: PositiveInt | None


class PreprocessSection(Section):
    filter_zero_advantage_groups: bool
    overlong_filtering: bool
    overlong_buffer_tokens: NonNegativeInt
    reference_concurrency: PositiveInt
    max_ready_steps: PositiveInt


class RLSection(Section):
    policy_loss: Literal["reinforce", "ppo", "gspo", "decoupled_ppo"]
    advantage: Literal["loo", "group_mean", "group_std", "batch_std", "value"]
    aggregation: Literal["sum_over_batch", "token_mean", "sample_mean", "prompt_mean"]
    ratio_clamp: PositiveFloat
    epsilon_low: PositiveFloat
    epsilon_high: PositiveFloat
    token_tis: PositiveFloat | None
    sequence_tis: PositiveFloat | None
    token_mis: PositiveFloat | None
    sequence_mis: PositiveFloat | None
    veto: float | None = Field(gt=0, lt=1)
    kl_coef: NonNegativeFloat
    final_kl_coef: NonNegativeFloat
    kl_clamp: PositiveFloat
    entropy_bonus: NonNegativeFloat
    final_entropy_bonus: NonNegativeFloat
    value_loss_coef: NonNegativeFloat
    no_positive_resampling: float | None = Field(gt=0, le=1)
    temperature: PositiveFloat


class LoraSection(Section):
    enabled: bool
    r: PositiveInt
    alpha: PositiveInt
    dropout: float = Field(ge=0, lt=1)
    target_modules: list[str] | str


class OptimizerSection(Section):
    betas: tuple[float, float]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat


class FinetuneSection(Section):
    seq_length: PositiveInt
    seq_packing: bool
    seq_parallel: PositiveInt
    train_batch_size: PositiveInt
    gradient_accumulation_passes: PositiveInt
    learning_rate: PositiveFloat
    lr_scheduler_type: Literal["constant", "constant_with_warmup", "linear", "cosine"]
    num_warmup_steps: NonNegativeInt
    optimizer: OptimizerSection
    gradient_clipping_threshold: PositiveFloat | None
    max_train_steps: PositiveInt
    weight_update_interval: PositiveInt
    save_checkpoint_steps: PositiveInt
    keep_checkpoints: PositiveInt
    dtype: Literal["float32", "bfloat16"]
    fp32_lm_head: bool
    head_chunk_tokens: PositiveInt
    gradient_checkpointing: bool
    attn_implementation: Literal["auto", "sdpa", "flash_attention_2", "flex_attention", "eager"]
    engine: Literal["auto", "ddp", "deepspeed", "fsdp2"]
    lora: LoraSection
    rl: RLSection


class VLLMSection(Section):
    vllm_kwargs: dict[str, Any]
    env: dict[str, str]


class WeightsSection(Section):
    backend: Literal["auto", "nccl", "ipc", "gloo"]
    bucket_mb: PositiveInt
    delta: bool
    timeout_s: PositiveFloat
    probe: bool
    probe_tolerance: PositiveFloat


class WorldSection(Section):
    accelerator: Literal["auto", "cuda", "cpu"]
    cpu_slots: PositiveInt
    gpus_per_node: PositiveInt | list[int] | None
    hosts: list[str] | None
    replicas: PositiveInt
    actor_fraction: Fraction
    preprocessor_fraction: Fraction
    finetune_fraction: Fraction
    share_devices: bool
    verifier_replicas: NonNegativeInt
    port_base: int | None = Field(ge=1024, le=65000)
    run_id: str | None


class StreamsSection(Section):
    backend: Literal["files", "redis"]
    segment_mb: PositiveInt
    fsync: Literal["never", "segment", "always"]
    host: str | None
    port: int | None = Field(ge=1, le=65535)
    external: bool
    max_record_mb: PositiveInt


class LauncherSection(Section):
    max_restarts: NonNegativeInt
    restart_backoff_s: PositiveFloat
    startup_timeout_s: PositiveFloat
    stop_timeout_s: PositiveFloat
    hang_timeout_s: PositiveFloat
    heartbeat_timeout_s: PositiveFloat
    node_timeout_s: PositiveFloat


class VerifierSection(Section):
    workers: PositiveInt
    timeout_s: PositiveFloat
    memory_mb: PositiveInt
    max_body_kb: PositiveInt


class WandbSection(Section):
    mode: Literal["online", "offline", "disabled"]
    wandb_project_name: str
    wandb_entity_name: str | None
    wandb_group: str | None
    wandb_name: str | None
    tags: list[str]


class TinyModelSection(Section):
    """Recipe of a model built on the spot when `model_path` does not exist; null = `model_path` must exist."""

    recipe: str
    seed: NonNegativeInt
    params: dict[str, Any]


class DomainSection(Section):
    """One domain of a mixed run; ``domains`` null = the single domain named at top level."""

    name: str
    weight: PositiveFloat
    rollout_policy: str
    dataset_loader: str
    dataset_loader_params: dict[str, Any]
    train_dataset_names: list[str]
    test_dataset_names: list[str]


class Config(Section):
    output_dir: str
    model_path: str
    tiny_model: TinyModelSection | None
    seed: NonNegativeInt
    attempts: PositiveInt
    max_lag_steps: NonNegativeInt | None
    schedule: Literal["pipeline", "conventional"]
    steps_per_phase: PositiveInt
    eval_every_n_versions: NonNegativeInt
    force_restart: bool
    dry_run: bool
    trust_remote_code: bool
    fp32_lm_head: bool
    use_deepspeed: bool
    deepspeed_config: str
    use_fsdp: bool
    sandbox_endpoint: str | None
    environment: Any
    domain: Any
    dataset_loader: str
    dataset_loader_params: dict[str, Any]
    train_dataset_names: list[str]
    test_dataset_names: list[str]
    domains: list[DomainSection] | None
    rewards: dict[str, Any]
    llm: LLMSection
    test_llm: LLMSection
    actor: ActorSection
    eval: EvalSection
    preprocess: PreprocessSection
    finetune: FinetuneSection
    vllm_config: VLLMSection
    weights: WeightsSection
    world: WorldSection
    streams: StreamsSection
    launcher: LauncherSection
    verifier: VerifierSection
    wandb: WandbSection

    @property
    def batch_size(self) -> int:
        """Samples (rollouts) per optimizer step over all trainer ranks."""
        return self.finetune.train_batch_size * self.finetune.gradient_accumulation_passes
