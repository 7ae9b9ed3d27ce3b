"""Entry point ``vllm.general_plugins``: makes our staged weight-transfer engine known to vLLM in every process."""

ENGINE = "pipelinerl.weights.worker"
BACKENDS = {"gloo": "gloo", "nccl": "staged_nccl", "ipc": "staged_ipc"}
"""Our backend → name in vLLM's registry (`nccl` and `ipc` are taken by vLLM's own engines, which do not stage)."""


def register() -> None:
    """Register once per process; vLLM may load plugins more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name in BACKENDS.values():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, ENGINE, "StagedWeightTransferEngine")
