"""Entry point ``vllm.general_plugins``, which runs first in every process of a vLLM server.

It registers our weight-transfer engine with vLLM. In OUR servers it also chooses the product of small layers on CPU,
has experts recorded there, and ties the processes to their parent, so that no engine outlives a killed API process.
Importing it imports neither torch nor vLLM.
"""

import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from pipelinerl.config.environment import is_on

CHILD_VARIABLE = "PIPELINERL_END_WITH_PARENT"
"""Set by `pipelinerl.inference`. Other users of vLLM in the same environment are not affected."""
PLUGIN = "pipelinerl_weights"
"""Its name among the entry points (`pyproject.toml`)."""
PLUGINS_VARIABLE = "VLLM_PLUGINS"
"""Names of the plugins that vLLM loads, separated by commas. Unset = all."""
ENGINE = "staged"
"""Name of our engine in vLLM's registry. Each update request names its own bucket transport."""
RECORD_VARIABLE = "PIPELINERL_RECORD_EXPERTS"
"""Set by `pipelinerl.inference` for a policy's server on CPU."""
SMALL = 65_536
"""Elements of a weight up to which torch's own product is at least as fast as oneDNN's, at 1 … 256 tokens."""


CPU_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""Set by `pipelinerl.inference` for a server on CPU."""
EXPECTED = {
    "vllm.config.scheduler": ("Using custom scheduler class",),
}
"""Starts of warnings about what we choose, by logger. They say nothing about a server of ours."""
EXPECTED_ON_CPU = {
    "vllm.config.vllm": (
        "Enforce eager set",
        "TORCH_COMPILE_DISABLE is set",
        "Inductor compilation was disabled",
        "Model Runner V2 requires Triton",
    ),
    "vllm.engine.arg_utils": ("The global random seed is set",),
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.v1.worker.cpu_worker": ("%s is not found in LD_PRELOAD",),
}


def register() -> None:
    """Registers the engine once per process, because vLLM may load plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipelinerl.world.process import die_with_parent

    if is_on(os.environ, CHILD_VARIABLE):
        drop_warnings(EXPECTED | (EXPECTED_ON_CPU if CPU_VARIABLE in os.environ else {}))
        multiply_small_layers_plainly()
        if is_on(os.environ, RECORD_VARIABLE):
            record_experts_on_cpu()
        if multiprocessing.parent_process() is not None:
            die_with_parent(signal.SIGKILL)
    if ENGINE not in WeightTransferEngineFactory._registry:  # noqa: SLF001 — vLLM refuses a second registration
        WeightTransferEngineFactory.register_engine(
            ENGINE, "pipelinerl.weights.load.worker", "StagedWeightTransferEngine"
        )


def drop_warnings(expected: Mapping[str, tuple[str, ...]]) -> None:
    """Drops the log records whose unformatted text begins so. ``expected``: starts by logger."""
    for name, starts in expected.items():
        logging.getLogger(name).addFilter(partial(_is_news, starts))
    warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated", FutureWarning)  # Triton's


def _is_news(starts: tuple[str, ...], record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(starts)


def multiply_small_layers_plainly() -> None:
    """Wraps vLLM's choice of a CPU layer's product. A layer that stays plain keeps its weight as a parameter."""
    # oneDNN builds a kernel per layer shape and number of tokens in about 0.2 ms, and in-flight batching meets more
    # numbers than it keeps. It also packs with every weight update. torch multiplies a layer of 64 × 192 in 0.02 ms.
    import torch
    from vllm.model_executor.layers import utils

    choose = utils.dispatch_cpu_unquantized_gemm
    if choose.__module__ == __name__:
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.dim() == 2 and weight.dtype == torch.float32 and weight.numel() <= SMALL:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            choose(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def record_experts_on_cpu() -> None:
    """Has vLLM's workers on CPU report the experts that they chose (`finetune.router_replay`), as those on GPUs do.

    vLLM records experts in its Model Runner V2, which needs Triton. Here its recorder is driven by the CPU's runner.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.platforms import current_platform
    from vllm.v1.worker import cpu_worker

    if cpu_worker.CPUModelRunner.__module__ == __name__:
        return
    check = VllmConfig._verify_aux_output_compatibility  # noqa: SLF001 — it accepts vLLM's own runner alone

    def check_with_own_runner(config: Any) -> None:
        with patch.object(current_platform, "is_out_of_tree", return_value=True):  # "brings its own model runner"
            check(config)

    class RecordingRunner(cpu_worker.CPUModelRunner):
        """vLLM's runner with the recorder, one step at a time: vLLM overlaps no steps on CPU."""

        _recorder: Any = None

        def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
            super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
            if self.vllm_config.aux_output_config.enabled:
                self._recorder = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

        def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._recorder is not None:
                self._recorder.begin_step(scheduler_output.aux_output_connector_metadata)
            self._num_tokens = scheduler_output.num_scheduled_tokens
            return super().execute_model(scheduler_output, *args, **kwargs)

        def sample_tokens(self, grammar_output: Any) -> Any:
            has_step = self.execute_model_state is not None
            output = super().sample_tokens(grammar_output)
            if has_step and self._recorder is not None:
                output.aux_output_connector_output = self._experts(output.sampled_token_ids)
            return output

        def _experts(self, sampled: list[list[int]]) -> Any:
            names = list(self.input_batch.req_ids)
            ends = np.cumsum([0, *(self._num_tokens[name] for name in names)])
            starts = self.input_batch.num_computed_tokens_cpu[: len(names)].copy()
            batch = SimpleNamespace(req_ids=names, query_start_loc_np=ends, num_computed_tokens_np=starts)
            pending = self._recorder.prepare_output(batch)
            if pending is None:  # another rank of the server reports
                return None
            num_sampled = np.array([len(tokens) for tokens in sampled])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            return pending.process_output()

    VllmConfig._verify_aux_output_compatibility = check_with_own_runner  # noqa: SLF001 — see above
    cpu_worker.CPUModelRunner = RecordingRunner
