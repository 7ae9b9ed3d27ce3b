"""Names of other libraries that ours override, set or call without a promise that they stay, in one table.

Each process checks its own at its start, since an override of a name that has gone is never called.
"""

import importlib
from typing import Any, Literal

from pipelinerl.config.versions import SUPPORTED, installed_version
from pipelinerl.errors import ConfigError

Part = Literal["server", "worker", "trainer", "deepspeed"]

_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_STAGE_3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_STAGE_1_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"
_TENSORS = ("torch.nn:Module._parameters", "torch.nn:Module._buffers", "torch:UntypedStorage._cdata")
PRIVATE_NAMES: dict[Part, tuple[str, ...]] = {
    "server": (
        f"{_SCHEDULER}._free_request",
        f"{_SCHEDULER}._preempt_request",
        f"{_SCHEDULER}._get_local_prefix_cache_hit",
        f"{_SCHEDULER}.add_request",
        f"{_SCHEDULER}.finish_requests",
        f"{_SCHEDULER}.update_from_output",
        "vllm.v1.engine.core:EngineCore.set_weight_version",
        "vllm.v1.engine.output_processor:LogprobsProcessor.from_new_request",
        "vllm.v1.engine.output_processor:LogprobsProcessor.update_from_output",
        "vllm.config:VllmConfig._verify_aux_output_compatibility",
        "vllm.distributed.weight_transfer.factory:WeightTransferEngineFactory._registry",
    ),
    "worker": (
        "vllm.lora.model_manager:get_supported_lora_modules",
        "vllm.lora.model_manager:LoRAModelManager._create_merged_loras_inplace",
        "vllm.lora.layers:BaseLayerWithLoRA.reset_lora",
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "torch:_foreach_copy_",
        "torch:UntypedStorage._new_shared_cuda",
        *_TENSORS,
    ),
    "trainer": (
        "transformers:PreTrainedConfig._attn_implementation",
        "torch:UntypedStorage._share_cuda_",
        "torch.distributed.checkpoint:DefaultSavePlanner.lookup_object",
        "torch.distributed.checkpoint:DefaultLoadPlanner.lookup_tensor",
        *_TENSORS,
    ),
    "deepspeed": (
        f"{_STAGE_1_2}._lazy_init_hp_params_optimizer_state",
        f"{_STAGE_1_2}.update_lp_params",
        f"{_STAGE_3}._partition_all_parameters",
        f"{_STAGE_3}._reassign_or_swap_out_partitioned_parameters",
        f"{_STAGE_3}.get_local_fp32_param",
    ),
}
"""`module:name`, by the part of a run that needs them."""


def require_private_names(part: Part) -> None:
    """
    Raises:
        ConfigError: a library has renamed one.
    """
    for place in PRIVATE_NAMES[part]:
        if not _exists(place):
            name = place.replace(":", ".")
            library = name.partition(".")[0]
            known = ", ".join(SUPPORTED[library].tested)
            found = f"{library} {installed_version(library)} has no `{name}`"
            raise ConfigError(f"{found}, on which the {part} relies: install {library} {known}")


def _exists(place: str) -> bool:
    module, _, name = place.partition(":")
    try:
        owner: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    *classes, last = name.split(".")
    for one in classes:
        owner = getattr(owner, one, None)
    # torch.nn.Module only annotates the attributes of its instances.
    return hasattr(owner, last) or last in getattr(owner, "__annotations__", ())
