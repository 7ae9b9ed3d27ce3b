"""Copies the recorded streams of another run into this one, whose roles then read them as they read live ones.

The other run may be alive, finished or killed, with streams in files or on its own redis. It is not changed. A copy
holds the raw records from the first on, so offsets stay what they were.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.config.debug import READS
from pipelinerl.config.load import load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.reading import look_into
from pipelinerl.streams import SingleStreamSpec, get_streams_backend
from pipelinerl.streams.files import FilesBackend

COPIED = "copied"
"""File beside the copied topic that says that the copy is complete."""
PACKED_BY = (
    "world.replicas",
    "finetune.train_batch_size",
    "finetune.gradient_accumulation_passes",
    "finetune.batch_unit",
    "finetune.seq_length",
    "finetune.seq_packing",
    "finetune.seq_parallel",
    "finetune.rl.advantage",
    "finetune.rl.reward_weights",
    "finetune.rl.aggregation",
)
"""Settings that packed micro-batches depend on."""
ROLLED_OUT_BY = ("world.replicas", "attempts")
"""Settings that groups of rollouts depend on."""


def source_of(config: Config) -> Path | None:
    return Path(config.debug.streams_from).expanduser().resolve() if config.debug.streams_from else None


def check_recording(config: Config, num_partitions: int) -> None:
    """Refuse a run whose recorded streams these roles cannot read.

    Args:
        num_partitions: trainer ranks of this world.

    Raises:
        ConfigError: there is no run, its settings do not fit, or records are missing.
    """
    source, mode = source_of(config), config.debug.mode
    if source is None or mode is None:
        return
    key = f"`debug.streams_from` is {config.debug.streams_from!r}"
    if not source.is_dir():
        raise ConfigError(f"{key}: there is no such folder")
    check_settings(config, load_old_run(source), key)
    with look_into(source):
        found = {spec: get_streams_backend().stats(spec) for spec in specs_of(source, READS[mode])}
    if not any(stats.next_offset for stats in found.values()):
        raise ConfigError(f"{key}: its topic `{READS[mode]}` has no records")
    for spec, stats in found.items():
        if stats.first_offset:
            raise ConfigError(
                f"{key}: {spec} begins with record {stats.first_offset}, because older records are deleted once they "
                "are used; record the run with a larger `streams.segment_mb`, which keeps them"
            )
    ranks = 1 + max(spec.partition for spec in found)
    if mode == "finetune" and ranks != num_partitions:
        raise ConfigError(
            f"{key}: its micro-batches are packed for {ranks} trainer rank(s), and this world has {num_partitions}; "
            "pack them again with debug.mode=preprocessor and the settings of this world"
        )


def check_settings(config: Config, recorded: Config, key: str) -> None:
    names = PACKED_BY if config.debug.mode == "finetune" else ROLLED_OUT_BY
    pairs = [(name, setting_of(recorded, name), setting_of(config, name)) for name in names]
    wrong = [f"`{name}` was {old!r} and is {new!r}" for name, old, new in pairs if old != new]
    if wrong:
        raise ConfigError(f"{key}: its records do not fit these settings ({', '.join(wrong)}); use those of the run")


def setting_of(config: Config, name: str) -> Any:
    return OmegaConf.select(OmegaConf.create(config.model_dump()), name)


def specs_of(run_dir: Path, topic: str) -> list[SingleStreamSpec]:
    return [spec for spec in get_streams_backend().specs(run_dir) if spec.topic == topic]


def copy_streams(config: Config, run_dir: Path, say: Callable[[str], None]) -> None:
    """Copy the topic that this run's roles read, once. A copy that was interrupted is begun again.

    Args:
        say: is told what was copied.
    """
    source, mode = source_of(config), config.debug.mode
    if source is None or mode is None:
        return
    topic = READS[mode]
    done = run_dir / "streams" / topic / COPIED
    if done.exists():
        return
    files = FilesBackend.from_config(config, run_dir)
    count = 0
    with look_into(source):
        for spec in specs_of(source, topic):
            target = SingleStreamSpec(run_dir, topic, spec.instance, spec.partition)
            files.delete(target)
            count += copy_stream(files, spec, target)
    done.touch(mode=0o600)
    say(f"copied {count} records of topic {topic} from {source}")


def copy_stream(files: FilesBackend, source: SingleStreamSpec, target: SingleStreamSpec) -> int:
    """Copy the records that a stream holds now. Returns their number."""
    cursor, appender = get_streams_backend().open_cursor(source, None, None), files.open_appender(target)
    try:
        while records := cursor.read(0):
            for _, payload in records:
                appender.append(bytes(payload))
        appender.sync()
        return appender.next_offset
    finally:
        cursor.close()
        appender.close()
