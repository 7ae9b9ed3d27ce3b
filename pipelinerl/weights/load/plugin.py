"""Entry point ``vllm.general_plugins``, which runs first in every process of a vLLM server.

It registers our weight-transfer engine with vLLM. In OUR servers it also chooses the product of small layers on CPU,
has experts recorded there, and ties the processes to their parent, so that no engine outlives a killed API process.
"""

import multiprocessing
import os
import signal

CHILD_VARIABLE = "PIPELINERL_END_WITH_PARENT"
"""Set by `pipelinerl.inference`. Other users of vLLM in the same environment are not affected."""
PLUGIN = "pipelinerl_weights"
"""Its name among the entry points (`pyproject.toml`)."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""Names of the plugins that vLLM loads, separated by commas. Unset = all."""
ENGINE = "staged"
"""Name of our engine in vLLM's registry. Each update request names its own bucket transport."""


def register() -> None:
    """Registers the engine once per process, because vLLM may load plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipelinerl.config.environment import is_on
    from pipelinerl.weights.load.expert_recording import RECORD_VARIABLE, record_experts_on_cpu
    from pipelinerl.weights.load.small_layers import multiply_small_layers_plainly
    from pipelinerl.world.process import die_with_parent

    if is_on(os.environ, CHILD_VARIABLE):
        multiply_small_layers_plainly()
        if is_on(os.environ, RECORD_VARIABLE):
            record_experts_on_cpu()
        if multiprocessing.parent_process() is not None:
            die_with_parent(signal.SIGKILL)
    if ENGINE not in WeightTransferEngineFactory._registry:  # noqa: SLF001 — vLLM refuses a second registration
        WeightTransferEngineFactory.register_engine(
            ENGINE, "pipelinerl.weights.load.worker", "StagedWeightTransferEngine"
        )
