"""Sections of where and how the run executes: devices, streams, launcher, verifier, archive, wandb."""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pipelinerl.config.backends import STREAM_BACKEND_PATTERN
from pipelinerl.config.keys import Section, key


class WorldSection(Section):
    """Devices and their division among the roles. [cluster.md](cluster.md) has the details."""

    accelerator: Literal["auto", "cuda", "cpu"] = key(
        "auto", "auto = cuda. A machine without a GPU needs `cpu`, unless `gpus_per_node` is set", may_change=True
    )
    cpu_slots: PositiveInt = key(
        2, "on CPU: slots of a node, divided like GPUs. Each is a share of the cores", may_change=True
    )
    gpus_per_node: PositiveInt | list[int] | None = key(
        None, "GPUs of every node, or a list with one count per node. Null = this node's, for all", may_change=True
    )
    gpu: str | None = key(
        None,
        "GPU that a dry run plans for, or a launcher without one, e.g. `H100-80GB`. Null = this machine's, or H100",
        may_change=True,
        coerce_numbers_to_str=True,  # 4090
    )
    hosts: list[str] | None = key(
        None,
        "names or addresses of the nodes in rank order. Null = from SLURM or `PIPELINERL_HOSTS`, or one node",
        may_change=True,
    )
    replicas: PositiveInt = key(1, "actors and preprocessors. Each has its own servers and its share of the problems")
    actor_fraction: NonNegativeInt = key(4, "share of the devices for policy servers", may_change=True)
    preprocessor_fraction: NonNegativeInt = key(
        0, "share for servers of the reference model, which a KL term needs", may_change=True
    )
    finetune_fraction: NonNegativeInt = key(
        4, "share for the trainer, which also gets what the servers' sizes leave over", may_change=True
    )
    nodes_per_server: PositiveInt = key(
        1, "nodes of each server, which divide its tensor × pipeline parallel size evenly", may_change=True
    )
    share_devices: bool = key(
        False, "trainer and servers use the same GPUs. Lower `gpu-memory-utilization` accordingly", may_change=True
    )
    verifier_replicas: NonNegativeInt = key(1, "verifier services. 0 = none, math needs one", may_change=True)
    env_replicas: PositiveInt = key(
        1, "servers of each of `environments` that does not set `replicas` itself", may_change=True
    )
    env_replicas_per_actor: PositiveInt | None = key(
        None, "the same per policy server. Null = `env_replicas` in the whole run", may_change=True
    )
    port_base: int | None = key(
        None,
        "first port of the run's block. Null = a free block (one node) or one derived from the run's identity "
        "(several)",
        may_change=True,
        ge=1024,
        le=65000,
    )
    run_id: str | None = key(
        None,
        "several nodes: a string that is the same on all and unique to this run. Null = SLURM's or torchrun's job id, "
        "else the rendezvous address",
        may_change=True,
    )
    tls: bool = key(
        False,
        "TLS for HTTP, redis and the bytes of weights over TCP between the nodes. Without the three files below, "
        "certificates are made from the run's secret",
        may_change=True,
    )
    tls_cert: str | None = key(None, "certificate of this node's servers (PEM), with its chain", may_change=True)
    tls_key: str | None = key(None, "private key of `tls_cert` (PEM)", may_change=True)
    tls_ca: str | None = key(
        None, "certificate of the authority that clients trust, besides the machine's own", may_change=True
    )


class StreamsSection(Section):
    """Streams between the roles. Choose the backend by `streams=files` or `streams=redis`."""

    backend: str = key(
        "files",
        "`files` in the run folder, `redis`, or a class. Several nodes without a shared folder need redis. A class is "
        "named by its dotted path and derived from `pipelinerl.streams.base.Backend`",
        pattern=STREAM_BACKEND_PATTERN,
    )
    options: dict[str, Any] = key({}, "arguments of a backend of your own")
    segment_mb: PositiveInt = key(
        64, "files: size of a segment. What all readers have passed is deleted by segments", may_change=True
    )
    fsync: Literal["never", "segment", "always"] = key(
        "segment",
        "when to flush to the disk. Segment = before anything points to the records: a power cut costs unsynced work "
        "only. Always = every record at once. Never = a power cut may cost the streams",
        may_change=True,
    )
    host: str | None = key(None, "redis: address of the server. Null = the leading node", may_change=True)
    port: int | None = key(None, "redis: port of the server. Null = a free port", may_change=True, ge=1, le=65535)
    external: bool = key(
        False,
        "redis: use the server at `host:port` instead of starting one. Its password is `PIPELINERL_REDIS_PASSWORD`",
        may_change=True,
    )
    max_record_mb: int = key(512, "a larger record is an error", may_change=True, ge=1, le=2047)


class LauncherSection(Section):
    """Deadlines and restarts."""

    engine: Literal["local", "ray"] = key(
        "local",
        "who starts the roles. Local = the launcher of their node. Ray = actors of a Ray cluster",
        may_change=True,
    )
    ray_address: str | None = key(
        None,
        "engine ray: its cluster, as `auto`, HOST:PORT or ray://HOST:PORT. Null = one of this machine, for the run",
        may_change=True,
    )
    max_restarts: NonNegativeInt = key(
        3, "restarts of roles over the whole run. After them the first failure ends it", may_change=True
    )
    restart_backoff_s: PositiveFloat = key(1, "pause before the first restart, which doubles", may_change=True)
    startup_timeout_s: PositiveFloat = key(1800, "a role must be ready within this", may_change=True)
    stop_timeout_s: PositiveFloat = key(8, "from SIGTERM to SIGKILL", may_change=True)
    save_timeout_s: PositiveFloat = key(
        60,
        "from SIGTERM to SIGKILL of a trainer whose last step is not saved. A second Ctrl-C ends it at once",
        may_change=True,
    )
    hang_timeout_s: PositiveFloat = key(
        1800, "a live role without progress for this long counts as failed", may_change=True
    )
    heartbeat_timeout_s: PositiveFloat = key(
        60,
        "a process that is silent for this long is frozen and counts as failed. A server's engine and redis-server too",
        may_change=True,
    )
    max_log_mb: PositiveInt = key(
        64,
        "largest `<role>/log.txt` and `metrics/*.jsonl`. A full log becomes `log.1.txt`. "
        "Metrics lose every second of their older points",
        may_change=True,
    )
    lease_ttl_s: PositiveFloat = key(
        30, "a role that has not renewed its lease for this long is not used any more", may_change=True
    )
    node_timeout_s: PositiveFloat = key(
        60,
        "several nodes: a launcher that has not renewed its lease for this long is lost with its node",
        may_change=True,
    )


class VerifierSection(Section):
    """Verifier services."""

    workers: PositiveInt = key(2, "processes per verifier service", may_change=True)
    timeout_s: PositiveFloat = key(5, "longest time of one check", may_change=True)
    memory_mb: PositiveInt = key(1024, "memory of one check", may_change=True)
    max_body_kb: PositiveInt = key(1024, "largest request", may_change=True)
    judges: list[str] = key([], "dotted names of judges besides `math` and `countdown`", may_change=True)


class ArchiveSection(Section):
    """Rollouts that stay in the run folder when the streams are trimmed, for `pipelinerl rollouts` and the report."""

    archive_mb: NonNegativeInt = key(
        256,
        "disk space for rollouts with their outcomes, and the trainer's log-probabilities of them. 0 = none stay",
        may_change=True,
    )
    rollouts_per_step: NonNegativeInt = key(
        16,
        "rollouts that stay of every optimizer step, attempts of one problem together. Remarkable ones stay besides: "
        "dropped, rewarded without success, the longest",
        may_change=True,
    )
    last_steps: PositiveInt = key(4, "newest optimizer steps of which every rollout stays", may_change=True)


class TracingSection(Section):
    """Spans of all roles: what each did from when to when, for `pipelinerl timeline` and OpenTelemetry."""

    trace_mb: NonNegativeInt = key(
        32,
        "disk space for the spans of one process. Beyond it the newest stay, at least half of it. 0 = none are written",
        may_change=True,
    )
    otlp_endpoint: str | None = key(
        None,
        "URL of an OpenTelemetry collector (OTLP over HTTP) that gets the spans too, e.g. `http://localhost:4318`. "
        "Needs `pip install 'pipelinerl[otlp]'`",
        may_change=True,
        pattern=r"^https?://",
    )


class WandbSection(Section):
    """Weights & Biases."""

    mode: Literal["online", "offline", "disabled"] = key(
        "online", "without an API key online becomes offline", may_change=True
    )
    wandb_project_name: str = key("pipeline-rl", "project", may_change=True)
    wandb_entity_name: str | None = key(None, "entity. Null = your default", may_change=True)
    wandb_group: str | None = key(
        None,
        "group. Null = the names of the run folder and its parent, and a digest of the path: no two runs share one",
        may_change=True,
    )
    wandb_name: str | None = key(None, "each role is a run `<name>_<role>`. Null = the group", may_change=True)
    tags: list[str] = key([], "tags", may_change=True)
    sample_steps: NonNegativeInt = key(
        20, "a table of rollouts in wandb and trackio every n optimizer steps. 0 = none", may_change=True
    )
