"""DeepSpeed ZeRO 1, 2 and 3, set up through Accelerate from a file of `conf/deepspeed`.

The settings of `finetune` override precision, batch size and clipping in the file. In bfloat16, ZeRO-2 and 3 accumulate
their shards in float32, because 64 micro-batches added in bfloat16 double the gradient's error. ZeRO-1 cannot.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelinerl.config.engine import TRAITS, deepspeed_file
from pipelinerl.config.private_names import require_private_names
from pipelinerl.config.sections import Config
from pipelinerl.finetune.data import Batch
from pipelinerl.finetune.engines.base import (
    OPTIMIZER_STATES,
    Engine,
    NonFiniteGradientError,
    adamw,
    set_step,
)
from pipelinerl.finetune.model import DTYPES, Policy, PolicyOutput, decoder_layers, is_empty, materialise
from pipelinerl.finetune.pieces import Piece
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.world.process import return_freed_heap

UNCLIPPED = 1e12
"""Threshold that clips nothing. DeepSpeed computes the gradient norm only when it clips."""


def deepspeed_settings(cfg: Config, path: Path) -> dict[str, Any]:
    """DeepSpeed's settings: those in the file at ``path``, overridden by those of `finetune`."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    half, stage = cfg.finetune.dtype == "bfloat16", settings["zero_optimization"]["stage"]
    if half and stage > 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": cfg.finetune.gradient_clipping_threshold or UNCLIPPED,
        "bf16": {"enabled": half},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }


class ZeroEngine(Engine):
    """`finetune.engine: deepspeed`."""

    traits = TRAITS["deepspeed"]

    def __init__(self, policy: Policy, cfg: Config, device: torch.device):
        self.device = device
        self.world_size, self.rank = dist.get_world_size(), dist.get_rank()
        settings = deepspeed_settings(cfg, deepspeed_file(cfg))
        self.stage = int(settings["zero_optimization"]["stage"])
        self.engine = _prepare(policy, settings, cfg, device)
        self.policy = self.engine.module
        self._parameters = dict(self.policy.named_parameters())
        self._trained = {name: p for name, p in self._parameters.items() if p.requires_grad}
        self._create_moments()

    def forward(self, batch: Batch, settings: LossSettings) -> PolicyOutput:
        return self.engine(batch, settings)

    def backward(self, loss: Tensor, last: bool) -> None:
        """As in ``Engine``. Scales the loss by the world size: DeepSpeed averages over ranks, and we need a sum."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * self.world_size)

    def step(self, learning_rate: float) -> float:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        if not self.engine.was_step_applied():
            raise NonFiniteGradientError("the gradient is not finite")
        norm = self.engine.get_global_grad_norm()
        return float(norm)

    def named_full_parameters(
        self, dtype: torch.dtype | None = None, *, trained_only: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """As in ``Engine``. DeepSpeed gathers its working copies, which have the training's dtype already."""
        import deepspeed

        for name, parameter in (self._trained if trained_only else self._parameters).items():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                yield name, parameter.detach()

    def full_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, tuple(getattr(p, "ds_shape", p.shape))) for name, p in self._parameters.items()]

    def pieces(self) -> dict[str, Piece]:
        found = {}
        for name, parameter in self._trained.items():
            for key in ("param", *OPTIMIZER_STATES):
                piece = self._piece(parameter, None if key == "param" else key)
                if piece is not None:
                    found[f"{name}.{key}"] = piece
        return found

    def weights(self) -> dict[str, Piece]:
        """As in ``Engine``, if all parameters are trained."""
        return {name.removesuffix(".param"): piece for name, piece in self.pieces().items() if name.endswith(".param")}

    def loaded(self, num_steps: int) -> None:
        set_step(self.engine.optimizer.optimizer, num_steps)
        self._refresh_working_copy()

    def _piece(self, parameter: Any, key: str | None) -> Piece | None:
        """This rank's range of the master weights (``key`` None) or of moment ``key``. None if it has no range."""
        if self.stage == 3:
            shard = parameter._z3_optimizer.get_local_fp32_param(parameter, key)  # noqa: SLF001 — no public access
            start, whole = self.rank * len(shard), parameter.ds_numel
            length = min(len(shard), whole - start)  # the last shards are padded
            return Piece(shard.detach()[:length], start, whole) if length > 0 else None
        mapping = parameter._hp_mapping  # noqa: SLF001 — where its master weights are
        if mapping is None:
            return None
        return Piece(mapping.get_hp_fragment(key).detach(), mapping.lp_fragment_address.start, parameter.numel())

    def _create_moments(self) -> None:
        """Create zero moments in the inner optimizer before its first step."""
        return_freed_heap()  # DeepSpeed has copied every shard twice
        zero = self.engine.optimizer
        flats = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        # DeepSpeed (0.19.8) makes them in the first step, and links only the first group's to their parameters.
        for flat in flats:
            # The fused kernel needs the step counter on the device.
            moments = {key: torch.zeros_like(flat) for key in OPTIMIZER_STATES}
            zero.optimizer.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        if self.stage != 3:
            zero._lazy_init_hp_params_optimizer_state()  # noqa: SLF001 — before the first step

    def _refresh_working_copy(self) -> None:
        """Copy the loaded float32 weights into the parameters that the forward pass uses."""
        zero = self.engine.optimizer
        if self.stage != 3:
            zero.update_lp_params()
            return
        zero._partition_all_parameters()  # noqa: SLF001 — refreshes the working copy after a load
        for group in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(group)  # noqa: SLF001 — refreshes the working copy after a load
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


def _prepare(policy: Policy, settings: dict[str, Any], cfg: Config, device: torch.device) -> Any:
    """Make the DeepSpeed engine for the policy through Accelerate."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    require_private_names("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    empty, dtype = is_empty(policy), DTYPES[cfg.finetune.dtype]
    if empty and settings["zero_optimization"]["stage"] == 3:
        _partition_by_layer(policy, settings, device, dtype)
    else:
        materialise(policy, device, dtype if empty else None)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings))
    prepared, _ = accelerator.prepare(policy, adamw(policy, cfg.finetune))
    return prepared


def _partition_by_layer(policy: Policy, settings: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """Allocate this rank's shards without values: layer by layer, then embedding and heads."""
    import deepspeed

    if policy.value_head is not None:
        policy.value_head.to(dtype)
    for part in (*decoder_layers(policy.lm), policy):
        materialise(part, device, dtype)
        deepspeed.zero.Init(module=part, config_dict_or_path=settings, dtype=dtype)
