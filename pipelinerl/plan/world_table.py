"""Renders the world and its memory plan as tables. Presentation only."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from pipelinerl.config.debug import started_kinds
from pipelinerl.config.paths import weight_store, without_credentials
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import sends_adapter
from pipelinerl.plan import ceiling
from pipelinerl.plan.memory import DevicePlan, memory_plan, sent_parameters, version_bytes
from pipelinerl.plan.model_shape import ModelShape, find_model_shape
from pipelinerl.plan.speed import (
    PROMPT_TOKENS,
    Gpu,
    RoleSpeed,
    assumed_lengths,
    communicators,
    planned_gpu,
    predicted_pause_s,
    predicted_speed,
)
from pipelinerl.plan.training_memory import GIB
from pipelinerl.world.map import Job, WorldMap


def world_table(world: WorldMap, weights_by: str | None = None, started: Collection[str] | None = None) -> Table:
    """Return a table with one line per job, ordered by node.

    Args:
        weights_by: what carries the weights. None = the world's backend.
        started: the kinds of jobs that this run starts. None = all.
    """
    unit = "GPUs" if world.accelerator == "cuda" else "cores"
    table = Table(
        title=world_title(world, weights_by or world.weight_backend), title_justify="left", header_style="bold"
    )
    for column in ("node", "job", unit, "listens on", "notes"):
        table.add_column(column, overflow="fold")
    for node in world.nodes:
        jobs = world.on_node(node.rank)
        for index, job in enumerate(jobs):
            devices = job.gpus if world.accelerator == "cuda" else job.cores
            table.add_row(
                f"{node.rank} {escape(node.hostname)}" if index == 0 else "",
                job.name,
                compact_numbers(devices),
                escape(job.url),
                escape(job_note(job, world)) if started is None or job.kind in started else "not started by this run",
                end_section=index == len(jobs) - 1,
            )
    return table


def world_title(world: WorldMap, weights_by: str) -> str:
    kind = "CPU slots" if world.accelerator == "cpu" else "GPUs"
    devices = sum(node.devices for node in world.nodes)
    parts = [
        f"{len(world.nodes)} node(s)",
        f"{devices} {kind}",
        f"{len(world.get('actor_llm'))} policy server(s)",
        f"{world.trainer_world_size} trainer rank(s)",
        f"weights by {weights_by}",
    ]
    if world.get("preprocessor_llm"):
        parts.insert(3, f"{len(world.get('preprocessor_llm'))} reference server(s)")
    if world.idle_devices:
        parts.append(f"{world.idle_devices} idle")
    return "World: " + ", ".join(parts)


def job_note(job: Job, world: WorldMap) -> str:
    if job.kind == "finetune":
        last = job.first_rank + job.num_ranks - 1
        return f"ranks {job.first_rank}–{last} of {world.trainer_world_size}, rendezvous port {world.master_port}"
    if job.span is not None and job.span.has_workers_only:
        return f"node {job.span.node} of the server at {job.span.host}, where its nodes meet at port {job.span.port}"
    if job.kind.endswith("_llm"):
        parallel = f"{job.num_ranks} devices, " if job.num_ranks > 1 else ""
        return f"{parallel}used by {job.kind.removesuffix('_llm')}_{job.serves}"
    return ""


def compact_numbers(numbers: tuple[int, ...]) -> str:
    """Join consecutive numbers: 0, 1, 2, 5 → "0–2,5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def memory_table(plans: tuple[DevicePlan, ...], gpu_bytes: int, gpu: str) -> Table:
    """Return a table with one section per kind of job. `gpu`: what is planned for."""
    size = f"{gpu_bytes / GIB:.0f} GiB, {escape(gpu)}"
    table = Table(title=f"Memory per GPU ({size}; estimates)", title_justify="left", header_style="bold")
    table.add_column("job", overflow="fold")
    table.add_column("holds")
    table.add_column("GiB", justify="right")
    table.add_column("notes", overflow="fold")
    for plan in plans:
        for index, item in enumerate(plan.items):
            first = index == 0
            name = f"{plan.kind} × {plan.num_devices}" if first else ""
            table.add_row(name, item.label, f"{item.num_bytes / GIB:.2f}", plan.note if first else "")
        verdict = f"of {plan.capacity / GIB:.2f}" if plan.fits else f"[bold red]MORE THAN {plan.capacity / GIB:.2f}[/]"
        table.add_row("", "[bold]sum[/]", f"[bold]{plan.total / GIB:.2f}[/]", verdict, end_section=True)
    return table


def speed_table(speeds: tuple[RoleSpeed, ...], gpu: str) -> Table:
    """Return a table with one line per kind of job. `gpu`: whose data sheet was taken."""
    title = f"Predicted speed ({escape(gpu)}; rooflines, not measured)"
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("job", overflow="fold")
    table.add_column("tokens/s", justify="right")
    table.add_column("MFU", justify="right")
    table.add_column("notes", overflow="fold")
    for speed in speeds:
        name = f"{speed.kind} × {speed.devices}"
        table.add_row(name, f"{speed.tokens_per_s:,.0f}", f"{speed.mfu:.1%}", speed.note)
    return table


def pause_line(cfg: Config, world: WorldMap, shape: ModelShape, gpu: Gpu, gpu_bytes: int) -> str:
    """Describe for how long a weight update stops a server."""
    servers = world.get("actor_llm")
    if not servers:
        return "Weight updates stop no server."
    pause_ms = 1e3 * predicted_pause_s(cfg, shape, gpu, servers[0].num_ranks, gpu_bytes)
    return f"A weight update stops a server's decoding for {pause_ms:.0f} ms beside the step under way (predicted)."


def update_line(cfg: Config, shape: ModelShape) -> str:
    """Describe the size of a weight update."""
    sent = version_bytes(cfg, shape)
    if not sends_adapter(cfg):
        return f"A weight update has {sent / 1e9:.2f} GB."
    share = shape.parameters / sent_parameters(cfg, shape)
    return f"A weight update has {sent / 1e9:.3f} GB, the adapter alone: {share:.0f} times fewer than all weights."


def communicators_line(world: WorldMap) -> str:
    """Describe the NCCL communicators that weight updates keep in a GPU."""
    servers = world.get("actor_llm")
    if world.weight_backend != "nccl" or not servers:
        return f"Weight updates go over {world.weight_backend}: no NCCL communicators."
    most = communicators(len(servers))
    return f"Weight updates go over nccl: at most {most} communicator(s) in a server's GPU and 1 in a trainer rank's."


def host_lines(cfg: Config, world: WorldMap, speeds: Sequence[RoleSpeed]) -> list[str]:
    """Describe what the devices ask of the CPUs where both sides work at the speed of the slower one."""
    if {speed.kind for speed in speeds} != {"finetune", "actor_llm"}:
        return []
    devices = sum(node.devices for node in world.nodes) - world.idle_devices
    slower = min(speed.tokens_per_s for speed in speeds)
    return ceiling.lines(cfg, slower, devices, assumed_lengths(cfg).mean, PROMPT_TOKENS)


def store_line(cfg: Config, shape: ModelShape | None) -> str:
    """Describe what `weights.backend=store` writes."""
    url = without_credentials(weight_store(cfg.weights.store, Path(cfg.output_dir)))
    text = f"Weights: every trainer rank writes its stripe of a version to {url}"
    if shape is None:
        return f"{text}; the bytes are not known: the config.json of {cfg.model_path} is not on this machine."
    version, keep = version_bytes(cfg, shape), cfg.weights.store_keep
    later = "less for a difference" if cfg.weights.delta else "as much for every later one"
    return (
        f"{text}: {version / GIB:.2f} GiB for a whole version, {later}. {keep} version(s) stay, besides those that "
        f"servers still read and the next one: about {(keep + 2) * version / GIB:.2f} GiB there."
    )


def render_world(cfg: Config, world: WorldMap) -> RenderableType:
    """Return the table of jobs. On CUDA add the memory plan if the model's sizes are known without a download."""
    shape = find_model_shape(cfg.model_path)
    is_stored = cfg.weights.backend == "store"
    jobs: RenderableType = world_table(world, "a store" if is_stored else None, started_kinds(cfg))
    if is_stored:
        jobs = Group(jobs, escape(store_line(cfg, shape)))
    if world.accelerator == "cpu":
        return jobs
    if shape is None:
        return Group(jobs, f"No memory plan: the config.json of {escape(cfg.model_path)} is not on this machine.")
    name, gpu, gpu_bytes = planned_gpu(cfg)
    plans = memory_plan(cfg, world, shape, gpu_bytes)
    speeds = predicted_speed(cfg, world, shape, gpu, gpu_bytes)
    return Group(
        jobs,
        memory_table(plans, gpu_bytes, name),
        speed_table(speeds, name),
        update_line(cfg, shape),
        pause_line(cfg, world, shape, gpu, gpu_bytes),
        communicators_line(world),
        *host_lines(cfg, world, speeds),
    )
