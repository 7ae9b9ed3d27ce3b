"""Sections of the inference servers and of their weight updates."""

from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from pipelinerl.config.backends import TransportName
from pipelinerl.config.keys import Section, key


class VLLMSection(Section):
    """Inference servers."""

    vllm_kwargs: dict[str, Any] = key(
        {
            "dtype": "${finetune.dtype}",
            "gpu-memory-utilization": 0.9,
            "max-num-seqs": "${actor.llm_max_rollouts}",
            "max-num-batched-tokens": 8192,
            "tensor-parallel-size": 1,
            "pipeline-parallel-size": 1,
            "generation-config": "vllm",
            "max_model_len": 10000,
        },
        "vLLM's own options without the leading dashes. `\"\"` or `true` = a flag, `null` = vLLM's default. "
        "Tensor × pipeline parallel size is the number of GPUs of a server",
        may_change=True,
    )
    prefix_caching: Literal["version", "conversation", "off"] = key(
        "version",
        "which keys and values of a prompt's beginning are used again. `version`: those computed by the weights that "
        "sample the request's first token. `conversation`: also those of the rollout's earlier turns, across updates. "
        "`off`: none. See [What a server does](serving.md#prefix-caching)",
        may_change=True,
    )
    env: dict[str, str | dict[Literal["env"], str]] = key(
        {}, "environment variables of the servers. A value may be `{env: NAME}` ([secrets](#secrets))", may_change=True
    )


class WeightsSection(Section):
    """Weight updates from the trainer to the servers."""

    backend: Literal["auto", TransportName, "store"] = key(
        "auto",
        "how weights travel from one process to the next. `nccl` between GPUs, `ipc` in a world of one shared GPU, "
        "`tcp` (through host memory) on CPU and on several shared GPUs. `store`: as files in `weights.store`, for "
        "servers that the trainer has no network to. See [No common network](cluster.md)",
        may_change=True,
    )
    store: str | None = key(
        None,
        "`store`: the folder or fsspec URL (`s3://bucket/run`) to which the trainer writes versions, and from which "
        "servers fetch them. `null` = `weights/store` in the run folder. Credentials come from the environment",
        may_change=True,
    )
    store_keep: PositiveInt = key(
        2, "`store`: minimum number of versions kept. Others are deleted when no server reads them", may_change=True
    )
    store_poll_s: PositiveFloat = key(
        0.5, "`store`: time between two looks of a server for a newer version", may_change=True
    )
    bucket_mb: PositiveFloat = key(
        128,
        "a server passes the weights on in pieces of this size, in a long chain of servers, and of small models, in "
        "smaller ones",
        may_change=True,
    )
    delta: Literal["auto"] | bool = key(
        False,
        "bf16: send only the elements that changed, bit-identical. Dense where that is smaller; with `auto` also where "
        "it is faster, as measured in this run",
        may_change=True,
    )
    timeout_s: PositiveFloat = key(
        120,
        "a server that takes longer for an update leaves service, unless others held it up. It returns when it answers "
        "and is updated",
        may_change=True,
    )
    stall_s: PositiveFloat = key(
        5,
        "seconds without data before a server pulls the rest of an update from another source. A server that is "
        "slower than the first by this time does not hold up the next update",
        may_change=True,
    )
    probe: bool = key(
        True,
        "after updates, compare the servers' live tensors with what was sent, and their log-probabilities with the "
        "trainer's. A server that misses is sent the weights again, then it leaves service",
        may_change=True,
    )
    probe_tolerance: PositiveFloat | Literal["auto"] = key(
        "auto",
        "largest deviation in nats, over likely tokens, between a healthy server and the trainer at equal weights. "
        "`auto` = 0.001 where both compute in float32, else 0.2. Each server's own is measured at its start, and later "
        "updates are judged by that",
        may_change=True,
    )
