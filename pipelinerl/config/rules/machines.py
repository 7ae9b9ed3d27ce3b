"""Rules about devices, streams, launcher and wandb."""

from pipelinerl.config.backends import WITH_KEYS_OF_THEIR_OWN
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import side_models

WANDB_CHARS, WANDB_TAG_CHARS, NOT_IN_WANDB_PROJECTS = 128, 64, "/\\#?%:"
"""What wandb takes: characters of a project, a group or a name, of a tag, and what is in no project's name."""
WANDB_ROLE_CHARS = 20
"""Room for the role behind a run's name, such as `_preprocessor_12`."""


def tls_files_are_complete(config: Config) -> str | None:
    world = config.world
    given = [world.tls_cert, world.tls_key, world.tls_ca]
    if any(given) and not (world.tls and all(given)):
        return (
            "`world.tls_cert`, `world.tls_key` and `world.tls_ca` go together, with `world.tls` true: set all of them, "
            "or none to have certificates made from the run's secret"
        )
    return None


def ray_shares_no_device(config: Config) -> str | None:
    if config.launcher.engine == "ray" and config.world.share_devices:
        return "`world.share_devices` is true but Ray gives a GPU to one role only: use launcher.engine=local"
    return None


def micro_batch_bytes(config: Config) -> int:
    """Ids, log-probabilities, advantages and reference log-probabilities take 16 bytes of a token."""
    return config.finetune.most_seen * 16


def micro_batch_fits_record(config: Config) -> str | None:
    """A backend of the user's own has a limit of its own, which `launcher.checks` compares."""
    needed = micro_batch_bytes(config)
    limit = config.streams.max_record_mb << 20
    if needed <= limit or config.streams.backend not in WITH_KEYS_OF_THEIR_OWN:
        return None
    return (
        f"`streams.max_record_mb` is {config.streams.max_record_mb} but a micro-batch of "
        f"`finetune.seq_length`={config.finetune.seq_length} tokens takes {needed / 2**20:.1f} MB: "
        "raise the first or lower the second"
    )


def external_redis_has_address(config: Config) -> str | None:
    streams = config.streams
    if streams.external and (streams.backend != "redis" or streams.host is None or streams.port is None):
        return "`streams.external` is true: it needs streams=redis, `streams.host` and `streams.port`"
    return None


def wandb_takes_its_names(config: Config) -> str | None:
    """Refuses names that wandb refuses, which it would do in the run, without its curves from then on."""
    if "wandb" not in config.trackers:
        return None
    names = config.wandb
    project = names.wandb_project_name
    if not project or len(project) > WANDB_CHARS or set(project) & set(NOT_IN_WANDB_PROJECTS):
        return (
            f"`wandb.wandb_project_name` is {project!r}: use 1 to {WANDB_CHARS} characters, without "
            f"{' '.join(NOT_IN_WANDB_PROJECTS)}"
        )
    for key, longest in (("wandb_group", WANDB_CHARS), ("wandb_name", WANDB_CHARS - WANDB_ROLE_CHARS)):
        if len(value := getattr(names, key) or "") > longest:
            return f"`wandb.{key}` is {value!r}, {len(value)} characters: use at most {longest}"
    for tag in names.tags:
        if not 1 <= len(tag) <= WANDB_TAG_CHARS:
            return f"`wandb.tags` has {tag!r}, {len(tag)} characters: use 1 to {WANDB_TAG_CHARS}"
    return None


def reference_without_kl(config: Config) -> str | None:
    if config.world.preprocessor_fraction > 0 and not side_models(config):
        return (
            "world.preprocessor_fraction gives devices to a reference server that nothing uses: kl_coef and "
            "final_kl_coef are 0, and there are no teachers or judges"
        )
    return None


def gpu_on_cpu(config: Config) -> str | None:
    if config.world.gpu is not None and config.world.accelerator == "cpu":
        return "world.gpu has no effect: world.accelerator=cpu"
    return None


def address_without_redis(config: Config) -> str | None:
    streams = config.streams
    if streams.backend == "files" and (streams.host is not None or streams.port is not None):
        return "streams.host and streams.port have no effect: streams=files"
    return None


def options_without_own_backend(config: Config) -> str | None:
    streams = config.streams
    if streams.options and streams.backend in WITH_KEYS_OF_THEIR_OWN:
        return f"streams.options has no effect: streams.backend is {streams.backend}, which has keys of its own"
    return None


def cluster_without_ray(config: Config) -> str | None:
    if config.launcher.ray_address is not None and config.launcher.engine != "ray":
        return f"launcher.ray_address has no effect: launcher.engine={config.launcher.engine}"
    return None


RULES = (
    wandb_takes_its_names,
    tls_files_are_complete,
    micro_batch_fits_record,
    external_redis_has_address,
    ray_shares_no_device,
)
HINTS = (
    reference_without_kl,
    gpu_on_cpu,
    address_without_redis,
    options_without_own_backend,
    cluster_without_ray,
)
