"""Entry point ``vllm.general_plugins``: runs in every process of a vLLM server, first of all.

Makes our staged weight-transfer engine known to vLLM, and ties the processes of OUR servers to their parent: killed
with SIGKILL, vLLM's front would leave its engine behind with memory and cores.
"""

import multiprocessing
import os
import signal

CHILD_VARIABLE = "PIPELINERL_END_WITH_PARENT"
"""Set by `pipelinerl.inference`; other users of vLLM in the same environment are left alone."""
ENGINE = "staged"
"""Its name in vLLM's registry. How bytes travel is said by every update."""


def register() -> None:
    """Register once per process; vLLM may load plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from pipelinerl.process import die_with_parent

    if os.environ.get(CHILD_VARIABLE) and multiprocessing.parent_process() is not None:
        die_with_parent(signal.SIGKILL)
    if ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE, "pipelinerl.weights.worker", "StagedWeightTransferEngine")
