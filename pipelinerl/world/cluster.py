"""The machines of a run: node ranks, host names, devices and cores, read from the environment.

It reads section `world` and the variables of torchrun, SLURM or a plain ``WORLD_SIZE``/``RANK`` environment. All
launchers of a run get the same ``Cluster``, except for its ``rank`` and cores. GPUs are counted through NVML.
"""

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import msgspec

from pipelinerl.config.sections import WorldSection
from pipelinerl.errors import WorldError

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
"""torchrun's own."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine."""

    rank: int
    hostname: str
    """Name or address for other nodes. In a world of one node this is the loopback address."""
    devices: int
    """GPUs, or slots on CPU."""
    cores: tuple[int, ...] = ()
    """CPU worlds: the cores that its slots share. Empty on CUDA, where no role is pinned."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """All machines of the run, as seen from the launcher of node ``rank``."""

    accelerator: Literal["cpu", "cuda"]
    nodes: tuple[Node, ...]
    rank: int = 0
    identity: str | None = None
    """A string that all launchers of this run share and other runs do not. None in a world of one node."""

    @property
    def total_devices(self) -> int:
        return sum(node.devices for node in self.nodes)


class NodeEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """This launcher's place among the nodes, according to the environment."""

    num_nodes: int = 1
    rank: int = 0
    hosts: tuple[str, ...] = ()
    identity: str | None = None
    source: str = "no launcher variables"


def read_cluster(
    world: WorldSection,
    env: Mapping[str, str],
    *,
    dry_run: bool = False,
    count_gpus: Callable[[], int] | None = None,
    affinity: Callable[[], set[int]] = lambda: os.sched_getaffinity(0),
) -> Cluster:
    """Read the cluster. ``count_gpus`` and ``affinity`` are the only I/O, and tests can replace them.

    Args:
        world: section `world` of the configuration.
        env: the launcher's environment.
        dry_run: without launcher variables ``world.hosts`` alone defines the nodes, and this launcher is the first.
        count_gpus: counts the GPUs of this node.
        affinity: returns the cores that this process may use.

    Raises:
        WorldError: environment and configuration contradict each other or do not describe a cluster.
    """
    place = read_node_environment(env)
    if dry_run and world.hosts and place.num_nodes == 1:
        place = msgspec.structs.replace(place, num_nodes=len(world.hosts))
    hosts = _hosts(world, place)
    gpus = _gpus_per_node(world, len(hosts), count_gpus or (lambda: count_visible_gpus(env)))
    accelerator = _accelerator(world, gpus)
    if accelerator == "cuda":
        nodes = tuple(Node(rank=i, hostname=host, devices=gpus[i]) for i, host in enumerate(hosts))
    else:
        cores = tuple(sorted(affinity()))
        nodes = tuple(Node(rank=i, hostname=host, devices=world.cpu_slots, cores=cores) for i, host in enumerate(hosts))
    identity = (world.run_id or place.identity or ",".join(hosts)) if len(hosts) > 1 else None
    return Cluster(accelerator=accelerator, nodes=nodes, rank=place.rank, identity=identity)


def read_node_environment(env: Mapping[str, str]) -> NodeEnvironment:
    """Read this launcher's place from torchrun's variables, ``WORLD_SIZE``/``RANK`` or SLURM's, in this order.

    Without any of them there is one node.

    Raises:
        WorldError: a variable is missing or no number, or several launchers run on this node.
    """
    if "GROUP_RANK" in env and "LOCAL_WORLD_SIZE" in env:
        return _from_torchrun(env)
    if "WORLD_SIZE" in env:
        return _from_world_size(env)
    if "SLURM_NODEID" in env and ("SLURM_STEP_NODELIST" in env or "SLURM_JOB_NODELIST" in env):
        return _from_slurm(env)
    return NodeEnvironment(hosts=_hosts_variable(env))


def _from_torchrun(env: Mapping[str, str]) -> NodeEnvironment:
    local = _integer(env, "LOCAL_WORLD_SIZE")
    if local != 1:
        raise WorldError(f"LOCAL_WORLD_SIZE={local}, but one launcher runs per node: use torchrun --nproc-per-node 1")
    return _node_environment(
        num_nodes=_integer(env, "WORLD_SIZE"),
        rank=_integer(env, "GROUP_RANK"),
        hosts=_hosts_variable(env),
        identity=env.get("TORCHELASTIC_RUN_ID") or _master(env),
        source="torchrun",
    )


def _from_world_size(env: Mapping[str, str]) -> NodeEnvironment:
    num_nodes = _integer(env, "WORLD_SIZE")
    if num_nodes > 1 and "RANK" not in env:
        raise WorldError(f"WORLD_SIZE={num_nodes} without RANK: set RANK to this node's number, 0 … {num_nodes - 1}")
    return _node_environment(
        num_nodes=num_nodes,
        rank=_integer(env, "RANK") if "RANK" in env else 0,
        hosts=_hosts_variable(env),
        identity=_master(env),
        source="WORLD_SIZE and RANK",
    )


def _from_slurm(env: Mapping[str, str]) -> NodeEnvironment:
    tasks = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    if env.get("SLURM_LOCALID", "0") != "0" or (tasks and int(tasks.group()) > 1):
        raise WorldError(
            "SLURM started several tasks on this node: use srun --ntasks-per-node=1 (one launcher per node)"
        )
    hosts = expand_nodelist(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"])
    return _node_environment(
        num_nodes=len(hosts),
        rank=_integer(env, "SLURM_NODEID"),
        hosts=_hosts_variable(env) or hosts,
        identity=f"slurm-{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}",
        source="SLURM",
    )


def _node_environment(
    *, num_nodes: int, rank: int, hosts: tuple[str, ...], identity: str | None, source: str
) -> NodeEnvironment:
    if num_nodes < 1 or not 0 <= rank < num_nodes:
        raise WorldError(f"node rank {rank} of {num_nodes} nodes (from {source}): ranks run from 0 to nodes - 1")
    return NodeEnvironment(num_nodes=num_nodes, rank=rank, hosts=hosts, identity=identity, source=source)


def _master(env: Mapping[str, str]) -> str | None:
    if "MASTER_ADDR" not in env:
        return None
    return f"{env['MASTER_ADDR']}:{env.get('MASTER_PORT', DEFAULT_MASTER_PORT)}"


def _hosts_variable(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(host.strip() for host in env.get("PIPELINERL_HOSTS", "").split(",") if host.strip())


def _integer(env: Mapping[str, str], key: str) -> int:
    try:
        return int(env[key])
    except KeyError:
        raise WorldError(f"environment variable {key} is missing") from None
    except ValueError:
        raise WorldError(f"environment variable {key}={env[key]!r} is not a whole number") from None


def _hosts(world: WorldSection, place: NodeEnvironment) -> tuple[str, ...]:
    """Return host names in node order.

    A single node has its loopback address, where its roles listen, unless `world.hosts` names it for others to join.
    """
    hosts = tuple(world.hosts) if world.hosts is not None else place.hosts
    source = "world.hosts" if world.hosts is not None else "the environment"
    if not hosts and place.num_nodes > 1:
        raise WorldError(
            f"{place.source} says {place.num_nodes} nodes, but nothing names them: set world.hosts (or "
            "PIPELINERL_HOSTS=host0,host1,…) to their names or addresses in rank order"
        )
    if hosts and len(hosts) != place.num_nodes:
        raise WorldError(
            f"{source} names {len(hosts)} hosts {list(hosts)}, but {place.source} means {place.num_nodes} node(s): "
            "set WORLD_SIZE to the number of launchers and RANK to each one's number"
        )
    if len(set(hosts)) != len(hosts):
        raise WorldError(f"{source} names a host twice: {list(hosts)}")
    return hosts if len(hosts) > 1 or world.hosts else (LOOPBACK,)


def _gpus_per_node(world: WorldSection, num_nodes: int, count_gpus: Callable[[], int]) -> tuple[int, ...]:
    """Return the configured GPUs of each node. By default every node has as many as this one."""
    configured = world.gpus_per_node
    if world.accelerator == "cpu":
        return (0,) * num_nodes
    if configured is None:
        return (count_gpus(),) * num_nodes
    if isinstance(configured, int):
        return (configured,) * num_nodes
    if len(configured) != num_nodes or min(configured) < 1:
        raise WorldError(
            f"world.gpus_per_node={configured} must give one count of at least 1 for each of the {num_nodes} node(s)"
        )
    return tuple(configured)


def _accelerator(world: WorldSection, gpus: tuple[int, ...]) -> Literal["cpu", "cuda"]:
    if world.accelerator == "cuda" and 0 in gpus:
        raise WorldError(
            "world.accelerator=cuda, but NVML finds no GPU here: set world.gpus_per_node, or world.accelerator=cpu"
        )
    if world.accelerator == "auto" and min(gpus) == 0:
        raise WorldError(
            "this configuration is for GPUs, and NVML finds none here: use a CPU configuration "
            "(--config-name=quickstart, or world.accelerator=cpu), or set world.gpus_per_node to plan another machine"
        )
    return "cpu" if world.accelerator == "cpu" else "cuda"


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand SLURM's compressed host list: ``gpu[01-03,7],login`` → gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        WorldError: the list cannot be read or names no host.
    """
    hosts: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]+|\[[^\]]*\])+", nodelist)
    if ",".join(parts) != nodelist:
        raise WorldError(f"SLURM's node list {nodelist!r} cannot be read, expected names such as gpu[01-16],login")
    for part in parts:
        hosts.extend(_expand_brackets(part))
    if not hosts:
        raise WorldError(f"SLURM's node list {nodelist!r} names no host")
    return tuple(hosts)


def _expand_brackets(name: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", name)
    if match is None:
        return [name]
    head, tail = name[: match.start()], name[match.end() :]
    numbers: list[str] = []
    for item in match.group(1).split(","):
        first, _, last = item.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise WorldError(f"SLURM's node list has the range {item!r}, expected numbers such as 01-16")
        numbers.extend(f"{n:0{len(first)}d}" for n in range(int(first), int(last or first) + 1))
    return [head + number + rest for number in numbers for rest in _expand_brackets(tail)]


def visible_device_names(env: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses: those before -1. None: the variable is not set."""
    value = env.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names: list[str] = []
    for name in (item.strip() for item in value.split(",")):
        if name in ("", "-1"):
            break
        names.append(name)
    return tuple(names)


def count_visible_gpus(env: Mapping[str, str]) -> int:
    """Return the number of GPUs that processes with this environment can use."""
    memory = gpu_memory_bytes()
    names = visible_device_names(env)
    if names is None or not memory:
        return len(memory)
    return sum(1 for name in names if not name.isdigit() or int(name) < len(memory))


def gpu_memory_bytes() -> tuple[int, ...]:
    """Return the total memory of each GPU of this machine in bytes. Empty without NVIDIA's driver."""
    return tuple(memory.total for memory in _of_each_gpu(_nvml_memory))


def gpu_used_bytes() -> tuple[int, ...]:
    """Return the used memory of each GPU of this machine in bytes."""
    return tuple(memory.used for memory in _of_each_gpu(_nvml_memory))


def gpu_names() -> tuple[str, ...]:
    """Return the name of each GPU of this machine, such as `NVIDIA H100 80GB HBM3`."""
    return _of_each_gpu(_nvml_name)


def _of_each_gpu(ask: Callable[[ctypes.CDLL, int], T]) -> tuple[T, ...]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        return tuple(ask(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


class _NvmlMemory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _nvml_memory(nvml: ctypes.CDLL, index: int) -> _NvmlMemory:
    """All fields are 0 if the driver returns an error."""
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return _NvmlMemory()
    return memory if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0 else _NvmlMemory()


def _nvml_name(nvml: ctypes.CDLL, index: int) -> str:
    """Empty if the driver returns an error."""
    handle, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) != 0:
        return ""
    return text.value.decode() if nvml.nvmlDeviceGetName(handle, text, ctypes.c_uint(len(text))) == 0 else ""


def visible_devices(gpus: tuple[int, ...], env: Mapping[str, str]) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a job.

    Args:
        gpus: the job's GPUs, as indices into the GPUs that this launcher may use.
        env: the launcher's environment.
    """
    names = visible_device_names(env)
    return ",".join(str(gpu) if names is None else names[gpu] for gpu in gpus)
