"""Builds vLLM's command line and environment from configuration and job. Pure.

``vllm_config.vllm_kwargs`` overrides every default here, but for keys that the run must set.
"""

import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipelinerl.config.environment import STRANGERS_VARIABLE, checked_variables
from pipelinerl.config.paths import PROFILES
from pipelinerl.config.sections import Config, JudgeSection, LoraSection
from pipelinerl.config.servers import (
    CAPTURE_SIZE,
    CAPTURED,
    EXPERT_KERNELS,
    FIRST_ROLLOUTS,
    SWAPPED_KERNELS,
    SideModel,
    captured_sequences,
    decay_of,
    devices_per_node,
    devices_per_server,
    option_of,
    sends_adapter,
    served_path,
    side_model,
)
from pipelinerl.config.variables import with_values
from pipelinerl.errors import ConfigError
from pipelinerl.plan.memory import kv_cache_bytes, planned_rollouts
from pipelinerl.plan.model_shape import find_context_limit, find_model_shape
from pipelinerl.weights.load.plugin import CHILD_VARIABLE, ENGINE, PLUGIN, PLUGINS_VARIABLE, RECORD_VARIABLE
from pipelinerl.weights.protocol import Averaging
from pipelinerl.world import Job, Span, WorldMap
from pipelinerl.world.network import listen_address

SERVED_NAMES = {"actor_llm": "policy", "preprocessor_llm": "reference"}
ACCESS_MIDDLEWARE = "pipelinerl.inference.access.RouteAccess"
SCHEDULER = "pipelinerl.inference.scheduler.AnswerScheduler"
WEIGHT_EXTENSION = "pipelinerl.weights.load.worker.WeightUpdateExtension"
SCORE_EXTENSION = "pipelinerl.inference.scoring.ScoreExtension"
FOLLOWING_EXTENSION = "pipelinerl.inference.scoring.FollowingScoreExtension"

QUANTIZED = (
    "a quantized server takes every version whole, loads it again in the pause and is not compared with what was sent: "
    "remove it"
)
SPECULATION = (
    "a draft model is never updated, and with n-grams vLLM 0.32 on CPU gives every fifth token a wrong log-probability "
    "or NaN: remove it"
)
RESERVED = {
    "host": "addresses come from the world map",
    "port": "ports come from the world map (world.port_base)",
    "uds": "servers listen on TCP",
    "model": "set model_path",
    "served-model-name": "clients address the model as `policy` or `reference`",
    "weight-transfer-config": "set weights.backend",
    "worker-extension-cls": "weight updates and exact scores use it",
    "logprobs-mode": "training needs the processed log-probabilities of what was sampled",
    "return-tokens-as-token-ids": "tokens are exact",
    "enable-scale-out": "the token-in/token-out endpoint is part of it",
    "data-parallel": "use more servers: world.actor_fraction",
    "prefill-context-parallel-size": "the world counts tensor × pipeline parallel size as a server's devices",
    "enable-eplb": "an update would not follow experts that move to other devices: remove it",
    "device-memory-utilization": "set gpu-memory-utilization, which the memory plan reads",
    "quantization": QUANTIZED,
    "quantization-config": QUANTIZED,
    "speculative-config": SPECULATION,
    "spec-method": SPECULATION,
    "spec-model": SPECULATION,
    "spec-tokens": SPECULATION,
    "enable-sleep-mode": "a server that sleeps takes no weights: use more servers, or world.share_devices",
    "api-server-count": "one API process takes the weight updates",
    "middleware": "the access control of our routes is one",
    "scheduler-cls": "ours keeps cached prompts exact",
    "enable-prefix-caching": "set vllm_config.prefix_caching",
    "enable-lora": "set finetune.lora",
    "max-loras": "every request runs with the trainer's adapter",
    "max-lora-rank": "set finetune.lora.r",
    "api-key": "the run's secret is the key",
    "root-path": "clients use the plain paths",
    "nnodes": "start the server's roles with --nodes",
    "node-rank": "start the server's roles with --node",
    "master-addr": "start the server's roles with --meet",
    "master-port": "start the server's roles with --meet",
    "headless": "start the server's roles with --node",
    "config": "put the settings into vllm_config.vllm_kwargs",
}
"""Keys that the user may not set to another value than the run's, with the reason or the fix."""
CPU_BLOCK = 32
"""Tokens of a block. Only whole blocks of a prompt are cached, and vLLM's own 128 is more than many prompts have.
Its CPU kernels want a multiple of 32."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM makes room."""


def vllm_arguments(cfg: Config, world: WorldMap, job: Job, gpu_bytes: int = 0) -> tuple[str, ...]:
    """Returns the command line of one server.

    Args:
        gpu_bytes: memory of its smallest GPU. 0 = not known.
    Raises:
        ConfigError: `vllm_config.vllm_kwargs` sets a reserved key.
    """
    user = cfg.vllm_config.vllm_kwargs
    own = _defaults(cfg, world, job)
    _refuse_reserved(user, own)
    _refuse_compiled_policy(user, world, job)
    settings = own | _shared_cache(cfg, world, job, gpu_bytes) | user
    if job.kind == "preprocessor_llm" and isinstance(settings.get("max-model-len"), int):
        settings["max-model-len"] += 1  # scoring n tokens asks for one more than was generated
        judge = _side_model(cfg, job)
        limit = find_context_limit(judge.model_path) if isinstance(judge, JudgeSection) else None
        settings["max-model-len"] = min(settings["max-model-len"], limit or math.inf)
    if job.kind == "actor_llm" and cfg.weights.probe and isinstance(settings.get("max-num-seqs"), int):
        settings["max-num-seqs"] += 1  # the weight probe takes no place from the rollouts
    settings |= _head_overrides(cfg, settings)
    return tuple(argument for key, value in settings.items() for argument in _render(key, value))


def vllm_environment(
    cfg: Config, world: WorldMap, job: Job, given: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Returns the environment variables of one server. `vllm_config.env` overrides them.

    Args:
        given: the process's own. A choice of vLLM's plugins is kept, and ours is added to it.
    """
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": job.hostname,
        CHILD_VARIABLE: "1",
    }
    if cfg.finetune.router_replay and job.kind == "actor_llm":
        runner = {RECORD_VARIABLE: "1"} if world.accelerator == "cpu" else {"VLLM_USE_V2_MODEL_RUNNER": "1"}
        env |= runner  # vLLM's V2 reports the experts that it chose, and on CPU ours does
    if world.is_open:
        env[STRANGERS_VARIABLE] = "1"
    if job.kind == "preprocessor_llm":
        env["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"  # no position beyond the model's own is ever computed
    if world.accelerator == "cpu":
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(_threads(cfg, job))}
        if job.cores:
            env["VLLM_CPU_OMP_THREADS_BIND"] = _core_groups(job.cores, _local_devices(cfg, job))
        if devices_per_server(cfg) == 1:
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if cfg.vllm_config.vllm_kwargs.get("enforce-eager", True):
            env["TORCH_COMPILE_DISABLE"] = "1"  # one kernel would be left: 14 s to compile, nothing to gain
    own = with_values(cfg.vllm_config.env, os.environ, "vllm_config.env")
    env |= own | checked_variables(own)
    chosen = env.get(PLUGINS_VARIABLE, given.get(PLUGINS_VARIABLE))
    return env if chosen is None else env | {PLUGINS_VARIABLE: ",".join(dict.fromkeys([*chosen.split(","), PLUGIN]))}


def first_rollouts(cfg: Config, ranks: int, gpu_bytes: int) -> int | None:
    """Returns the rollouts at a time that a policy server takes at first. None: it always takes a fixed number.

    Args:
        ranks: devices of the server.
        gpu_bytes: memory of its smallest GPU. 0 = not known.
    """
    if cfg.actor.llm_max_rollouts != "auto":
        return None
    shape = find_model_shape(cfg.model_path) if gpu_bytes else None
    return FIRST_ROLLOUTS if shape is None else planned_rollouts(cfg, shape, ranks, gpu_bytes)


def _defaults(cfg: Config, world: WorldMap, job: Job) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "model": served_path(cfg, side := _side_model(cfg, job)),
        "served-model-name": SERVED_NAMES[job.kind],
        "host": listen_address(job.hostname) or world.bind_host,
        "port": job.port,
        "seed": cfg.seed * 1000 + (job.replica_idx if job.span is None else _common_number(job.span)),
        "middleware": ACCESS_MIDDLEWARE,
        "enable-scale-out": True,
        "logprobs-mode": "processed_logprobs",
        "return-tokens-as-token-ids": True,
        "scheduler-cls": SCHEDULER,
        "enable-prefix-caching": job.kind == "actor_llm" and cfg.vllm_config.prefix_caching != "off",
        "trust-remote-code": cfg.trust_remote_code,
        "disable-log-stats": True,
        "log-error-stack": True,
        "disable-uvicorn-access-log": True,
        "disable-fastapi-docs": True,
    }
    follows = decay_of(cfg, job.kind, _server_number(job)) is not None
    if job.kind == "actor_llm" or follows:
        settings["weight-transfer-config"] = {"backend": ENGINE}
    if job.kind == "actor_llm":
        settings["worker-extension-cls"] = WEIGHT_EXTENSION
        if sends_adapter(cfg):
            settings |= _adapter_settings(cfg.finetune.lora)
        if cfg.finetune.router_replay:
            settings["enable-return-routed-experts"] = True
    else:
        settings["worker-extension-cls"] = FOLLOWING_EXTENSION if follows else SCORE_EXTENSION
        if isinstance(side, JudgeSection) and side.kind == "reward":
            settings |= {"runner": "pooling", "convert": "classify"}
        if cfg.finetune.rl.teacher_top_k:
            settings["max-logprobs"] = cfg.finetune.rl.teacher_top_k
    if world.accelerator == "cuda":
        shape = find_model_shape(cfg.model_path) if "weight-transfer-config" in settings else None
        if shape is not None and shape.experts > 1:
            settings[EXPERT_KERNELS] = SWAPPED_KERNELS[0]
        if job.kind == "actor_llm" and (most := captured_sequences(cfg) or 0) > CAPTURED:
            settings[CAPTURE_SIZE] = most
    if world.accelerator == "cpu":
        settings["enforce-eager"] = True
        settings["block-size"] = CPU_BLOCK
        if devices_per_server(cfg) == 1:
            settings["distributed-executor-backend"] = "uni"
    return settings | (_span_settings(job.span) if job.span else {})


def _adapter_settings(lora: LoraSection) -> dict[str, Any]:
    """Room for one adapter, in the model's data type, around the layers that the trainer adapts.

    Raises:
        ConfigError: vLLM supports no such rank.
    """
    rank = next((rank for rank in RANKS if rank >= lora.r), None)
    if rank is None:
        raise ConfigError(
            f"`finetune.lora.r` is {lora.r}, but vLLM serves adapters up to rank {RANKS[-1]}: lower it, or set "
            "finetune.lora.send=merged"
        )
    return {"enable-lora": True, "max-loras": 1, "max-lora-rank": rank}


def score_temperature(cfg: Config, job: Job) -> float | None:
    """Temperature at which a server scores, or at which a judge's requests begin. None: it is a policy server."""
    if job.kind == "actor_llm":
        return None
    return 1.0 if isinstance(_side_model(cfg, job), JudgeSection) else cfg.llm.temperature


def averaging(cfg: Config, job: Job, run_dir: Path) -> Averaging | None:
    """How a server averages the versions that it takes. None: it serves what it has, or takes versions as they are."""
    decay, finetune = decay_of(cfg, job.kind, _server_number(job)), cfg.finetune
    if decay is None:
        return None
    folder = run_dir.absolute() / job.name / "average"
    # One file more than the trainer keeps checkpoints, because a checkpoint is done later.
    return Averaging(decay, str(folder), finetune.save_checkpoint_steps, finetune.keep_checkpoints + 1)


def profiling(cfg: Config, job: Job, run_dir: Path) -> tuple[str, ...]:
    """Arguments that let the trainer start and stop vLLM's profiler (`finetune.profile_steps`), which costs nothing
    before. The user's own choice of a profiler wins.
    """
    chosen = any(option_of(key) == "profiler-config" for key in cfg.vllm_config.vllm_kwargs)
    if cfg.finetune.profile_steps is None or job.kind != "actor_llm" or chosen:
        return ()
    settings = {
        "profiler": "torch",
        "torch_profiler_dir": str(run_dir.absolute() / PROFILES / job.name),
        "torch_profiler_with_stack": False,  # stacks slow each operation, and make files of gigabytes
        "ignore_frontend": True,  # a single-process server has one profiler, which its worker takes
    }
    return _render("profiler-config", settings)


def _side_model(cfg: Config, job: Job) -> SideModel | None:
    return side_model(cfg, job.kind, _server_number(job))


def _server_number(job: Job) -> int:
    """Number of the server that the job is, or is a part of."""
    workers_only = job.span is not None and job.span.has_workers_only
    return job.replica_idx // (job.span.nodes - 1) if workers_only and job.span else job.replica_idx


def _span_settings(span: Span) -> dict[str, Any]:
    return {
        "nnodes": span.nodes,
        "node-rank": span.node,
        "master-addr": span.host,
        "master-port": span.port,
        "distributed-executor-backend": "mp",
        "headless": span.has_workers_only or None,
    }


def _common_number(span: Span) -> int:
    """A number that all nodes of a server know: its workers sample the same tokens only with the same seed."""
    return zlib.crc32(f"{span.host}:{span.port}".encode()) % 1_000_000


def _shared_cache(cfg: Config, world: WorldMap, job: Job, gpu_bytes: int) -> dict[str, Any]:
    """Sets the KV cache size from the memory plan if server and trainer share GPUs."""
    # vLLM would measure the free memory while the trainer is still loading, and take the trainer's.
    shape = find_model_shape(served_path(cfg, _side_model(cfg, job))) if world.share_devices and gpu_bytes else None
    cache = kv_cache_bytes(cfg, shape, job.kind, job.num_ranks, gpu_bytes) if shape else 0
    return {"kv-cache-memory-bytes": cache} if cache else {}


def _refuse_reserved(user: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    for key, value in user.items():
        option = option_of(key)
        if option == "hf-overrides" and "quantization_config" in f"{key} {value}":
            option = "quantization-config"
        reason = RESERVED.get("data-parallel" if option.startswith("data-parallel-") else option)
        harmless = value == own[key] if key in own else value is None or value is False
        if reason is not None and not harmless:
            raise ConfigError(f"`vllm_config.vllm_kwargs.{key}` is {value!r}, but the run sets it: {reason}")


def _refuse_compiled_policy(user: Mapping[str, Any], world: WorldMap, job: Job) -> None:
    if world.accelerator == "cpu" and job.kind == "actor_llm" and user.get("enforce-eager") is False:
        raise ConfigError(
            "`vllm_config.vllm_kwargs.enforce-eager` is false, but on CPU packed weights are replaced by reference, "
            "which compiled code is not known to follow: remove it"
        )


def _head_overrides(cfg: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the setting that makes the head float32, unless the model is in float32. The user's overrides win."""
    if not cfg.fp32_lm_head or settings.get("dtype") in ("float32", "float"):
        return {}
    if any(key.startswith("hf-overrides.") for key in settings):  # vLLM joins these, and takes no whole beside them
        key = "hf-overrides.head_dtype"
        return {key: settings.get(key, "float32")}
    given = settings.get("hf-overrides") or {}
    overrides = json.loads(given) if isinstance(given, str) else dict(given)
    return {"hf-overrides": {"head_dtype": "float32"} | overrides}


def _render(key: str, value: Any) -> tuple[str, ...]:
    """Renders one setting: None = vLLM's default (no argument), "" and true = a flag, false = the negated flag."""
    if value is None:
        return ()
    if value is True or value == "":
        return (f"--{key}",)
    if value is False:
        return () if key in PLAIN_FLAGS else (f"--no-{key}",)
    if isinstance(value, (dict, list)):
        return (f"--{key}", json.dumps(value))
    return (f"--{key}", str(value))


PLAIN_FLAGS = frozenset({"disable-log-stats", "disable-uvicorn-access-log", "disable-fastapi-docs"})
"""Flags without a negated form in vLLM's parser."""


def _threads(cfg: Config, job: Job) -> int:
    return max(len(job.cores) // _local_devices(cfg, job), 1)


def _local_devices(cfg: Config, job: Job) -> int:
    return devices_per_node(cfg, job.span.nodes if job.span else 1)


def _core_groups(cores: tuple[int, ...], world_size: int) -> str:
    """Renders vLLM's syntax: commas between the cores of a worker, bars between workers."""
    per_worker = max(len(cores) // world_size, 1)
    groups = [cores[i * per_worker : (i + 1) * per_worker] or cores for i in range(world_size)]
    return "|".join(",".join(str(core) for core in group) for group in groups)
