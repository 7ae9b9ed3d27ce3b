"""All checks before a start, in one place. A start and a dry run run the same checks.

Checks of the plan need the configuration, and the data sheet of a GPU. Checks of this machine (devices, model, domain,
disk, redis-server) say nothing about another machine. A dry run for devices that this machine lacks therefore turns
their refusals into warnings, but for those of a data set or template that is here and wrong.
"""

import os
import resource
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import msgspec
from jinja2 import TemplateError

from pipelinerl.chat.families import check_family
from pipelinerl.config import paths, rules
from pipelinerl.config.backends import WITH_KEYS_OF_THEIR_OWN
from pipelinerl.config.debug import WITH_ROLLOUTS, started_kinds
from pipelinerl.config.engine import ADAMW, MUON, check_ranks, engine_of, traits_of
from pipelinerl.config.environment import checked_variables
from pipelinerl.config.origin import data_file
from pipelinerl.config.servers import (
    EXPERT_KERNELS,
    EXPERT_PARALLEL,
    SWAPPED_KERNELS,
    parallel_sizes,
    requests_per_worker,
)
from pipelinerl.config.variables import with_values
from pipelinerl.config.versions import unsupported
from pipelinerl.domains.sandbox.choice import ENDPOINT_VARIABLE
from pipelinerl.errors import ConfigError, DatasetError, PipelineRLError
from pipelinerl.inference.args import vllm_arguments
from pipelinerl.launcher import preflight
from pipelinerl.launcher.conversations import check_conversations
from pipelinerl.launcher.existing_servers import check_existing
from pipelinerl.launcher.memory_kills import usable_memory
from pipelinerl.launcher.model_build import needs_tiny_model
from pipelinerl.launcher.processes import TEMPORARY_PREFIX
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.launcher.running import say, terminal
from pipelinerl.launcher.streams_at_start import check_recording
from pipelinerl.launcher.vllm_options import check_options
from pipelinerl.observability.wandb import MODE_VARIABLE, effective_mode
from pipelinerl.plan.memory import checkpoint_bytes, memory_plan, node_host_bytes, version_bytes
from pipelinerl.plan.model_shape import find_model_shape
from pipelinerl.plan.proposal import Target, advice, as_arguments, proposal
from pipelinerl.plan.speed import planned_gpu
from pipelinerl.plan.training_memory import GIB
from pipelinerl.streams.api import make_backend
from pipelinerl.streams.redis_server import redis_command
from pipelinerl.weights.staging_memory import WHOLE_BYTES
from pipelinerl.world import check_local_devices
from pipelinerl.world.cluster import gpu_memory_bytes
from pipelinerl.world.disk import existing_part, matching
from pipelinerl.world.placement import SERVER_KINDS
from pipelinerl.world.process import MAX_OPEN_FILES, connections_of, files_for
from pipelinerl.world.proxies import check_proxy

HOST_FIXES = {
    "versions and a checkpoint": "train on more nodes, or an adapter (finetune.lora)",
    "offloaded states": "set finetune.cpu_offload=false, or train on more nodes",
    "staged updates": "lower vllm_config.vllm_kwargs.gpu-memory-utilization, so that updates are staged on the GPU",
}
"""By the largest part of `node_host_bytes`."""
SPARE_BYTES = 256 * 2**20
"""For streams, logs and metrics."""

LARGEST_SOCKET_PATH = 107
"""Bytes of a unix socket's path on Linux (`sun_path`), without the zero at its end."""
SOCKET_NAME_BYTES = len("/") + len(str(uuid.UUID(int=0)))
"""vLLM names a socket in its folder so."""
TEMPORARY_BYTES = len(f"/{TEMPORARY_PREFIX}") + 8
"""The launcher makes a folder in `TMPDIR` for the roles that it starts itself: `tempfile` adds eight characters."""


StartCheck = Callable[[RunPlan], list[str] | None]
"""Raises a `PipelineRLError` to refuse the start. Returns warnings, if it has any to give."""


def checked(plan: RunPlan) -> RunPlan:
    """Run every check, print the warnings, and return the plan with `builds_model` set."""
    started, checking = time.monotonic(), ["the plan"]
    with terminal.live(lambda: f"checking {checking[-1]}, {time.monotonic() - started:.0f} s"):
        warnings = run_checks(plan, begin=checking.append)
    for warning in warnings:
        say(f"warning: {warning}")
    return replace(plan, builds_model=needs_tiny_model(plan.config, plan.overrides))


def run_checks(
    plan: RunPlan, *, only_shown: bool = False, begin: Callable[[str], None] = lambda name: None
) -> list[str]:
    """Run all checks and return their warnings. The first refusal is raised.

    Args:
        only_shown: this is a dry run. Refusals by this machine become warnings if the plan is for another machine.
        begin: called with the name of each check of this machine before it runs.
    """
    warnings = [warning for plan_check in OF_THE_PLAN for warning in plan_check(plan) or ()]
    forgiving = only_shown and is_for_elsewhere(plan)
    for machine_check in OF_THIS_MACHINE:
        begin(f"the {machine_check.__name__}")
        try:
            warnings += machine_check(plan) or ()
        except PipelineRLError as error:
            if not forgiving or is_of_a_file_here(error):
                raise
            warnings.append(f"on this machine: {error}")
    return warnings


def is_for_elsewhere(plan: RunPlan) -> bool:
    """Whether the run is planned for devices that this machine does not have."""
    try:
        check_local_devices(plan.world, plan.node_rank, os.environ)
    except PipelineRLError:
        return True
    return False


class WrongFileError(ConfigError):
    """A file that is here cannot be used. No other machine would take it."""


def is_of_a_file_here(error: PipelineRLError) -> bool:
    """Whether a refusal is about a data set or chat template that is on this machine."""
    names = error.names if isinstance(error, DatasetError) else ()
    files = [local[0] for name in names if (local := data_file(name))]
    return isinstance(error, WrongFileError) or any(os.path.exists(file) or matching(file) for file in files)


def variables(plan: RunPlan) -> None:
    """Refuse a reference to an environment variable that is not set, or has a wrong value."""
    filled = with_values(plan.container, os.environ)
    try:
        checked_variables(filled["vllm_config"]["env"])
    except ConfigError as error:
        raise ConfigError(f"`vllm_config.env`: {error}") from error


def open_files(plan: RunPlan) -> list[str]:
    """Compare the hard limit on open files, up to which every role raises its own, with what rollout workers need."""
    actors = [job for job in plan.world.on_node(plan.node_rank) if job.kind == "actor"]
    most = max((requests_per_worker(plan.config, len(plan.world.servers_of(job))) for job in actors), default=0)
    hard, needed = resource.getrlimit(resource.RLIMIT_NOFILE)[1], min(files_for(most), MAX_OPEN_FILES)
    if hard == resource.RLIM_INFINITY or hard >= needed:
        return []
    fix = f"raise it to {needed} (ulimit -Hn {needed}, LimitNOFILE=, docker --ulimit nofile)"
    if hard < (least := files_for(0)):
        raise ConfigError(f"the hard limit on open files is {hard}, and every role needs {least}: {fix}")
    return [
        f"the hard limit on open files is {hard}: a rollout worker has at most {connections_of(hard)} requests under "
        f"way at once, not {most}; {fix}, or raise actor.rollout_workers"
    ]


def temporary_folder(plan: RunPlan) -> None:
    """Refuse a folder for temporary files in which the sockets of vLLM's processes would have too long names."""
    launcher, variable = plan.config.launcher.engine, "VLLM_RPC_BASE_PATH"
    folder, most = os.environ.get(variable, ""), LARGEST_SOCKET_PATH - SOCKET_NAME_BYTES
    if not folder:
        variable, folder = "TMPDIR", tempfile.gettempdir()
        most -= TEMPORARY_BYTES
    excess = len(os.fsencode(folder)) - most
    # Ray's nodes have environments of their own.
    is_used = launcher != "ray" and any(job.kind in SERVER_KINDS for job in plan.jobs)
    if excess > 0 and is_used:
        raise ConfigError(
            f"{variable} is {folder!r}: the servers' sockets in it would have paths {excess} bytes longer than the "
            f"kernel takes; set it to a folder of at most {most} bytes, such as /tmp"
        )


def settings_without_effect(plan: RunPlan) -> list[str]:
    return rules.hints(plan.config)


def wandb_key(plan: RunPlan) -> list[str]:
    is_asked = plan.config.wandb.mode == "online" and not os.environ.get(MODE_VARIABLE)
    if is_asked and effective_mode("online") == "offline":
        return ["wandb has no API key: it records offline (`wandb sync` uploads); wandb.mode=disabled turns it off"]
    return []


def server_arguments(plan: RunPlan) -> None:
    """Refuse options that the run sets, and more GPUs in a server than vLLM divides the heads among."""
    config, shape = plan.config, find_model_shape(plan.config.model_path)
    ranks, _ = parallel_sizes(config)
    if shape is not None and shape.heads % ranks and not config.debug.existing_llms:
        raise ConfigError(
            f"`vllm_config.vllm_kwargs.tensor-parallel-size` is {ranks}, which does not divide the {shape.heads} "
            f"attention heads of {config.model_path}: set it to a divisor of them"
        )
    for job in (*plan.world.get("actor_llm"), *plan.world.get("preprocessor_llm")):
        vllm_arguments(plan.config, plan.world, job)


def options_of_servers(plan: RunPlan) -> None:
    check_options(plan.config)


def stream_backend(plan: RunPlan) -> None:
    """Refuse a stream backend of the user's own whose records hold no micro-batch. Opens no stream."""
    name, needed = plan.config.streams.backend, rules.machines.micro_batch_bytes(plan.config)
    if name in WITH_KEYS_OF_THEIR_OWN:
        return
    try:
        most = make_backend(plan.config, plan.path).max_record_bytes
    except PipelineRLError:
        raise
    except Exception as error:  # the user's class
        raise ConfigError(f"`streams.backend` is {name}: {type(error).__name__}: {error}") from error
    if most < needed:
        raise ConfigError(
            f"`streams.backend` is {name}, whose records have at most {most} bytes (max_record_bytes), but a "
            f"micro-batch of `finetune.seq_length`={plan.config.finetune.seq_length} tokens takes {needed}: raise the "
            "first or lower the second"
        )


def engine(plan: RunPlan) -> None:
    check_ranks(plan.config, plan.world.trainer_world_size)


def optimizer(plan: RunPlan) -> list[str]:
    """Refuse an optimizer that the engine cannot run, or whose package is not installed."""
    options, ranks = plan.config.finetune.optimizer, plan.world.trainer_world_size
    if options.name == ADAMW:
        return ["finetune.optimizer.kwargs has no effect: adamw takes none"] if options.kwargs else []
    name = engine_of(plan.config, ranks)
    if traits_of(name).shards_only_adamw:
        raise ConfigError(
            f"`finetune.optimizer.name` is {options.name}, but {name} shards the states of adamw only: set "
            "finetune.engine=fsdp2 or finetune.engine=ddp"
        )
    package = options.name.partition(".")[0]
    if options.name != MUON and find_spec(package) is None:
        raise ConfigError(f"`finetune.optimizer.name` is {options.name}: {package} is not installed")
    return []


def experts(plan: RunPlan) -> list[str]:
    """Refuse settings for experts if the model has none, or if its experts cannot be divided so."""
    config, options = plan.config, plan.config.vllm_config.vllm_kwargs
    parallel, dividing = options.get(EXPERT_PARALLEL) in (True, ""), config.finetune.expert_ranks or 1
    wanted = {
        "finetune.router_replay": config.finetune.router_replay,
        "finetune.expert_ranks": dividing > 1 and dividing,
    }
    wanted[f"vllm_config.vllm_kwargs.{EXPERT_PARALLEL}"] = parallel
    shape = find_model_shape(config.model_path)
    for key, value in wanted.items():
        if value and shape is not None and shape.experts == 1:
            raise ConfigError(f"`{key}` is {str(value).lower()}, but {config.model_path} has no experts: remove it")
    if shape is not None and shape.experts % dividing:
        raise ConfigError(
            f"`finetune.expert_ranks` is {dividing}, which does not divide the {shape.experts} experts of "
            f"{config.model_path}: set it to a divisor of them, or to null"
        )
    kernels = options.get(EXPERT_KERNELS, SWAPPED_KERNELS[0])
    if shape is not None and shape.experts > 1 and kernels not in SWAPPED_KERNELS:
        version = version_bytes(config, shape)
        if version > WHOLE_BYTES:
            raise ConfigError(
                f"`vllm_config.vllm_kwargs.{EXPERT_KERNELS}` is {kernels}, but only {' and '.join(SWAPPED_KERNELS)} "
                f"keep experts as they are sent: with others each worker holds a whole version, "
                f"{version / GIB:.0f} GiB, of which {WHOLE_BYTES / GIB:.0f} are allowed; remove it"
            )
    if parallel and parallel_sizes(config)[0] == 1:
        return [f"vllm_config.vllm_kwargs.{EXPERT_PARALLEL} has no effect with tensor-parallel-size=1"]
    return []


class MemoryPlanError(ConfigError):
    """The planned memory exceeds that of a GPU."""


def memory(plan: RunPlan) -> list[str]:
    """Refuse a plan that does not fit into GPU memory. Warn of one that nearly fills it."""
    cfg = plan.config
    shape = find_model_shape(cfg.model_path) if plan.world.accelerator == "cuda" else None
    name, _, gpu_bytes = planned_gpu(cfg)
    is_known = cfg.dry_run or cfg.world.gpu or gpu_memory_bytes()  # a launcher beside a Ray cluster has no GPU
    if shape is None or not is_known:
        return []
    kinds = started_kinds(cfg)
    needs = memory_plan(cfg, plan.world, shape, gpu_bytes)
    needs = tuple(need for need in needs if kinds is None or need.kind in kinds)
    if all(need.fits and not need.is_tight for need in needs):
        return []
    counted = [need.kind for need in needs]
    target = Target(shape=shape, nodes=plan.world.nodes, gpu_bytes=gpu_bytes, kinds=counted)
    if not is_for_elsewhere(plan):
        target = msgspec.structs.replace(target, host_bytes=usable_memory())
    for need in needs:
        if not need.fits:
            raise MemoryPlanError(
                f"memory plan ({name}): {need.kind} needs {need.total / GIB:.0f} GiB of "
                f"{need.capacity / GIB:.0f} GiB per GPU; {advice(cfg, target)}"
            )
    found = proposal(cfg, target)
    spare = f"; it has room to spare with {as_arguments(found)}" if found else ""
    return [
        f"memory plan: {need.kind} needs {need.total / GIB:.0f} GiB of {need.capacity / GIB:.0f} GiB per GPU: an "
        f"estimate, so close to the limit that it may not fit{spare}"
        for need in needs
        if need.is_tight
    ]


def host_memory(plan: RunPlan) -> None:
    """Refuse a plan that needs more host memory on this node than the machine, or this container, has."""
    shape = find_model_shape(plan.config.model_path) if plan.world.accelerator == "cuda" else None
    detected = gpu_memory_bytes()
    if shape is None or not detected or started_kinds(plan.config) is not None:
        return
    parts = node_host_bytes(plan.config, plan.world, shape, min(detected), plan.node_rank)
    needed, limit = sum(parts.values()), usable_memory()
    if needed > limit:
        held = ", ".join(f"{size / GIB:.0f} for {name}" for name, size in parts.items() if size)
        raise ConfigError(
            f"memory plan: the roles of this node need {needed / GIB:.0f} GiB of host memory ({held}), and it has "
            f"{limit / GIB:.0f} GiB: {HOST_FIXES[max(parts, key=parts.__getitem__)]}"
        )


def devices(plan: RunPlan) -> None:
    if plan.config.launcher.engine == "ray":  # Ray has counted the devices of its nodes
        return
    check_local_devices(plan.world, plan.node_rank, os.environ)


def redis(plan: RunPlan) -> None:
    streams = plan.config.streams
    if streams.backend == "redis" and not streams.external and plan.node_rank == 0:
        redis_command()


def disk(plan: RunPlan) -> list[str]:
    """Refuse if one checkpoint does not fit on the disk. Warn if those that the run keeps do not fit."""
    folder = existing_part(plan.path)
    free = shutil.disk_usage(folder).free
    shape = find_model_shape(plan.config.model_path)
    one = checkpoint_bytes(plan.config, shape) if shape else 0
    kept = one * (plan.config.finetune.keep_checkpoints + 1)
    if free < one + SPARE_BYTES:
        raise ConfigError(
            f"`output_dir` is {str(plan.path)!r}: its disk has {free / GIB:.1f} GiB free, and one checkpoint needs "
            f"{(one + SPARE_BYTES) / GIB:.1f} GiB; choose another folder or free the disk"
        )
    if free < kept + SPARE_BYTES:
        return [
            f"output_dir has {free / GIB:.1f} GiB free, and finetune.keep_checkpoints="
            f"{plan.config.finetune.keep_checkpoints} with one in the making needs {kept / GIB:.1f} GiB"
        ]
    return []


def store_of_weights(plan: RunPlan) -> None:
    """Refuse a store that does not answer, or whose disk has no room for the versions that it keeps. Writes nothing."""
    from pipelinerl.weights.store.files import open_files
    from pipelinerl.weights.store.manifest import StoreError

    weights = plan.config.weights
    if weights.backend != "store":
        return
    url = paths.weight_store(weights.store, plan.path)
    try:
        open_files(url).names()
    except StoreError as error:
        raise ConfigError(f"`weights.store` is {paths.without_credentials(url)!r}: {error}") from error
    if "://" in url:
        return
    folder = existing_part(Path(url))
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(f"`weights.store` is {url!r}, but {folder} is no folder that this user may write to")
    shape, free = find_model_shape(plan.config.model_path), shutil.disk_usage(folder).free
    needed = (weights.store_keep + 2) * (version_bytes(plan.config, shape) if shape else 0)
    if free < needed:
        raise ConfigError(
            f"`weights.store` is {url!r}: its disk has {free / GIB:.1f} GiB free, and weights.store_keep="
            f"{weights.store_keep} versions with two in passing need {needed / GIB:.1f} GiB"
        )


def libraries(plan: RunPlan) -> list[str]:
    preflight.check_companions()
    return unsupported()


def model(plan: RunPlan) -> list[str]:
    from pipelinerl.tiny_model.recipes import make_recipe  # imports the domains

    tiny = plan.config.tiny_model
    if needs_tiny_model(plan.config, plan.overrides):
        assert tiny is not None
        if "." not in tiny.recipe:  # a function of the user's own runs in the builder
            make_recipe(tiny.recipe, dict(tiny.params))
    else:
        preflight.check_model(plan.config.model_path)
        preflight.check_context(plan.config)
        preflight.check_architecture(plan.config, plan.world.trainer_world_size)
    preflight.check_scoring_models(plan.config)
    return preflight.check_judges(plan.config)


def standalone_roles(plan: RunPlan) -> list[str]:
    """Refuse standalone roles on several nodes, without servers that answer, or on streams that they cannot read."""
    mode = plan.config.debug.mode
    if mode is not None and len(plan.world.nodes) > 1:
        raise ConfigError(f"`debug.mode` is {mode}: standalone roles run on one node, and this world has several")
    check_recording(plan.config, plan.world.trainer_world_size)
    return check_existing(plan.config)


def renderer(plan: RunPlan) -> None:
    """Refuse a family that `renderers` does not have, or options that it does not take."""
    for section in (plan.config.llm, plan.config.test_llm):
        if section.renderer is not None:
            check_family(section.renderer, section.chat_template_kwargs)


def templates(plan: RunPlan) -> None:
    """Refuse a chat template that is no Jinja, or no file."""
    for name, section in (("llm", plan.config.llm), ("test_llm", plan.config.test_llm)):
        chosen = section.chat_template
        if chosen is None or not (os.path.exists(chosen) or "/" in chosen or Path(chosen).suffix):
            continue  # a name without a path may be one of the tokenizer's templates
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            _compile_jinja_template(Path(chosen).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            said = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            kind = WrongFileError if os.path.exists(chosen) else ConfigError
            raise kind(
                f"`{name}.chat_template` is {chosen!r}: {said}; give the path of a Jinja template in UTF-8"
            ) from error


def objective(plan: RunPlan) -> None:
    preflight.check_objective(plan.config, plan.container)


def proxies(plan: RunPlan) -> None:
    """Refuse a proxy of the site that cannot carry the requests of rollouts to other services."""
    services = {f"judges.{judge.name}.url": judge.url for judge in plan.config.judges}
    services["sandbox_endpoint"] = plan.config.sandbox_endpoint or os.environ.get(ENDPOINT_VARIABLE)
    for key, url in services.items():
        if url:
            check_proxy(key, url)


def conversations(plan: RunPlan) -> list[str]:
    return check_conversations(plan.config)


def domain(plan: RunPlan) -> list[str]:
    if plan.config.debug.mode not in (None, *WITH_ROLLOUTS) or plan.config.stage == "sft":
        return []
    preflight.check_parsers(plan.config, plan.container)
    return preflight.check_domain({**plan.container, "jobs": plan.world.job_dicts()})


OF_THE_PLAN: tuple[StartCheck, ...] = (
    settings_without_effect,
    wandb_key,
    server_arguments,
    stream_backend,
    engine,
    optimizer,
    experts,
    memory,
)
OF_THIS_MACHINE: tuple[StartCheck, ...] = (
    variables,
    devices,
    open_files,
    temporary_folder,
    standalone_roles,
    options_of_servers,
    host_memory,
    redis,
    disk,
    store_of_weights,
    libraries,
    model,
    renderer,
    templates,
    objective,
    proxies,
    conversations,
    domain,
)
