"""Builds the policy in its engine, and the rules by which micro-batches are laid out for it.

`finetune.compile` compiles each decoder layer in the parts before and after packed attention, which stays outside.
Layers of one shape share their compiled code, in which the number of tokens is a symbol.
"""

import logging
from pathlib import Path

import torch
from torch import nn

from pipelinerl.config.engine import engine_of, traits_of
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len
from pipelinerl.errors import ConfigError
from pipelinerl.finetune.accumulate import BatchRules
from pipelinerl.finetune.architecture import examine
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.engines import Engine, build_engine, join_ranks
from pipelinerl.finetune.export import read_value_head
from pipelinerl.finetune.images import ImageReader, takes_images
from pipelinerl.finetune.loading import load_model, stream_weights
from pipelinerl.finetune.model import Policy, decoder_layers, isolation_error
from pipelinerl.finetune.router_replay import RouterReplay
from pipelinerl.finetune.sequence import make_sequence_group
from pipelinerl.plan.memory import head_chunk, with_choices
from pipelinerl.plan.model_shape import find_model_shape


def compile_layers(lm: nn.Module, backend: str = "inductor") -> None:
    """Let every decoder layer be compiled when it is first called.

    Args:
        lm: attends with ``attention.PACKED``.
        backend: of torch.compile.
    """
    register_attention(PACKED, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(lm):
        layer.compile(backend=backend, dynamic=True)


log = logging.getLogger(__name__)

MAX_ISOLATION_ERROR = 1e-4
"""Relative change of hidden states. Isolated documents change by rounding at most, others by more than 0.05."""


def make_engine(cfg: Config, device: torch.device, world_size: int) -> Engine:
    """The policy at `model_path` in the configured engine. Verifies that packed documents are isolated."""
    engine = load_engine(cfg, device, world_size)
    if cfg.finetune.seq_packing:
        verify_isolation(engine, engine.policy.lm.config.get_text_config()._attn_implementation)  # noqa: SLF001 — has no public name
    return engine


def load_engine(cfg: Config, device: torch.device, world_size: int) -> Engine:
    """The policy at `model_path` in the configured engine."""
    gpu_bytes = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    shape = find_model_shape(cfg.model_path)
    cfg = with_choices(cfg, shape, world_size, gpu_bytes)
    finetune = cfg.finetune
    name = engine_of(cfg, world_size)
    if world_size % finetune.seq_parallel:
        raise ConfigError(
            f"finetune.seq_parallel is {finetune.seq_parallel}: trainer ranks, {world_size}, must be its multiple"
        )
    join_ranks(name, world_size, device, max(cfg.launcher.startup_timeout_s, cfg.launcher.hang_timeout_s))
    found = examine(
        cfg.model_path,
        attention=finetune.attn_implementation,
        packing=finetune.seq_packing,
        seq_parallel=finetune.seq_parallel,
        trust_remote_code=cfg.trust_remote_code,
        share_prefixes=finetune.shares_prefixes,
        longest=max_model_len(cfg),
        has_reference=cfg.world.preprocessor_fraction > 0,
        divides_experts=(finetune.expert_ranks or 1) > 1,
    )
    lm, files = load_model(
        cfg, found.attention, whole=finetune.lora.enabled and traits_of(name).loads_whole_with_adapters
    )
    if finetune.compile:
        _require_packed_attention(found.attention)
        compile_layers(lm)
    policy = Policy(
        lm,
        temperature=cfg.llm.temperature,
        chunk=head_chunk(cfg, shape, world_size, gpu_bytes),
        fp32_head=cfg.fp32_lm_head,
        value_loss_coef=finetune.rl.value_loss_coef if finetune.rl.advantage == "value" else None,
        lora_scaling=finetune.lora.alpha / finetune.lora.r,
        sequence=make_sequence_group(finetune.seq_parallel),
        logit_map=found.logit_map,
        routing=RouterReplay(decoder_layers(lm)) if finetune.router_replay else None,
        images=ImageReader(lm, cfg.model_path, cfg.trust_remote_code) if takes_images(lm) else None,
    )
    read_value_head(policy, Path(cfg.model_path))
    engine = build_engine(name, policy, cfg, device)
    if files is not None:
        stream_weights(engine, files)
    log.info(
        "event=engine_made engine=%s ranks=%d gradient_checkpointing=%s shard_gradients=%s cpu_offload=%s "
        "prefixes_computed_again_for=%s",
        *(name, world_size, finetune.gradient_checkpointing, finetune.shard_gradients, finetune.cpu_offload),
        finetune.recomputed_for,
    )
    return engine


def _require_packed_attention(attention: str) -> None:
    if attention != PACKED:
        raise ConfigError(
            f"finetune.compile: this model's attention is {attention}, which is not compiled; set it false"
        )


def verify_isolation(engine: Engine, attention: str) -> None:
    """Raise ``ConfigError`` if this device's ``attention`` lets packed documents see each other. Collective."""
    vocab_size = engine.policy.lm.config.get_text_config().vocab_size
    error = isolation_error(engine.evaluate, vocab_size, engine.device)
    if not error <= MAX_ISOLATION_ERROR:
        raise ConfigError(
            f"finetune.attn_implementation: packed documents see each other in {attention!r} on this device (states "
            f"move by {error:.2g} of their size, {MAX_ISOLATION_ERROR} is allowed); set it to sdpa, or "
            "finetune.seq_packing=false"
        )
    log.info("event=documents_isolated attention=%s error=%.2g", attention, error)


def make_rules(engine: Engine, cfg: Config) -> BatchRules:
    """The rules by which micro-batches are checked and laid out for this engine's policy."""
    policy = engine.policy
    config = policy.lm.config.get_text_config()
    attention = config._attn_implementation  # noqa: SLF001 — has no public name
    per_document = "flash" in attention or (attention == PACKED and engine.device.type == "cuda")
    return BatchRules(
        vocab_size=config.vocab_size,
        max_lag_steps=cfg.token_lag_bound,
        layout="rows" if not cfg.finetune.seq_packing else "packed" if per_document else "cheaper",
        dense_mask=attention != PACKED,
        share_prefixes=cfg.finetune.shares_prefixes,
        tokens_per_attention_unit=6 * config.hidden_size,
        sequence=policy.sequence,
        images=policy.images,
    )
