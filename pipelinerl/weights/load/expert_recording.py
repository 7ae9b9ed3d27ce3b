"""Servers on CPU report the experts that they chose (`finetune.router_replay`), as vLLM's do on GPUs.

vLLM records experts in its Model Runner V2, which needs Triton. Here its recorder is driven by the CPU's runner.
"""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

RECORD_VARIABLE = "PIPELINERL_RECORD_EXPERTS"
"""Set by `pipelinerl.inference` for a policy's server on CPU."""


def record_experts_on_cpu() -> None:
    """Has vLLM's workers on CPU record experts, and its configuration allow it."""
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
    from vllm.platforms import current_platform
    from vllm.v1.worker import cpu_worker

    if cpu_worker.CPUModelRunner.__module__ == __name__:
        return
    check = VllmConfig._verify_aux_output_compatibility  # noqa: SLF001 — it knows no runner but its own

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
