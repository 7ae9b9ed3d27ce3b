"""The streams before a role starts: they go on, are set aside or deleted, or are copied from another run.

`take` decides for the launcher that owns the run, `follow` for one that follows in a folder of its own.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from pipelinerl.config.debug import READS
from pipelinerl.config.load import load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, PipelineRLError, WorldError
from pipelinerl.inspect import ledger, verify
from pipelinerl.inspect.reading import look_into
from pipelinerl.launcher.run_dir import Claim
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.launcher.running import adopt_secrets, say
from pipelinerl.membership.lease import LauncherNote
from pipelinerl.records.messages import EvaluationDone, EvaluationMessage
from pipelinerl.records.topics import EVALUATION, TRAINING_DATA
from pipelinerl.streams import SingleStreamSpec, backend_from_config, get_streams_backend, open_reader
from pipelinerl.streams.epoch import (
    EPOCH_FILE,
    EVALUATIONS_FILE,
    LEDGER_FILE,
    StreamEpoch,
    lost_folder,
    read_epoch,
    write_epoch,
)
from pipelinerl.streams.files import FilesBackend
from pipelinerl.world import WorldMap
from pipelinerl.world.disk import make_folder, sync_path

log = logging.getLogger(__name__)

HAVE_STREAMS = ("actor", "preprocessor", "finetune")
"""Kinds that store stream positions in their run folder."""
DAMAGE_FILE = "damage.txt"
COPIED = "copied"
"""File beside a topic whose copy is complete."""
PACKED_BY = (
    "world.replicas",
    "finetune.train_batch_size",
    "finetune.gradient_accumulation_passes",
    "finetune.batch_unit",
    "finetune.seq_length",
    "finetune.seq_packing",
    "finetune.share_prefixes",
    "finetune.seq_parallel",
    "finetune.rl.advantage",
    "finetune.rl.reward_weights",
    "finetune.rl.aggregation",
)
"""Settings that packed micro-batches depend on."""
ROLLED_OUT_BY = ("world.replicas", "attempts")
"""Settings that groups of rollouts depend on."""


def take(claim: Claim, plan: RunPlan) -> bool:
    """Prepare the streams for this launch. Returns whether an external redis has records of an earlier one.

    Raises:
        ConfigError: an external redis may delete records, or has streams of an earlier run in the folder of a new one.
            Or the streams are packed for other trainer ranks.
    """
    config = plan.config
    is_external = config.streams.external
    if is_external:
        adopt_secrets(plan)
        check_external(claim.path, config)
        if config.force_restart:
            delete_external(claim.path, config)
    if claim.resumed and config.resume == "checkpoint":
        begin_epoch(claim.path, config, say)
    elif claim.resumed:
        check_packing(claim.path, config, plan.world)
    are_old = is_external and has_records(claim.path, config)
    if are_old and not claim.resumed and _has_streams(plan):
        raise ConfigError(_of_an_earlier_run(claim.path, config))
    copy_streams(config, claim.path, say)
    return are_old


def follow(claim: Claim, plan: RunPlan, leader: LauncherNote) -> None:
    """Begin a new epoch in the folder of a node that follows, if the leader began one.

    Raises:
        ConfigError: the folder is new and the streams are old, or the folder has a run and the leader's has none.
    """
    config = plan.config
    if not _has_streams(plan):  # any such node may come later
        return
    if leader.old_streams and not claim.resumed:
        raise ConfigError(_of_an_earlier_run(claim.path, config))
    if config.resume != "checkpoint":
        return
    if claim.resumed and not leader.resumed:
        raise ConfigError(
            "`resume` is checkpoint, but the run folder of node 0 is new, so the old streams have not been deleted: "
            "start node 0 with its old folder"
        )
    if leader.resumed:
        begin_epoch(claim.path, config, say, owns_external=False)


def _has_streams(plan: RunPlan) -> bool:
    return any(job.kind in HAVE_STREAMS for job in plan.world.on_node(plan.node_rank))


def _of_an_earlier_run(path: Path, config: Config) -> str:
    return (
        f"`output_dir` is {str(path)!r}: on this node it is new, but redis at {config.streams.host}:"
        f"{config.streams.port} has the streams of an earlier run in it; bring that run's folder back to resume it, "
        "choose another folder, or use force_restart=true to delete the streams"
    )


def begin_epoch(run_dir: Path, config: Config, say: Callable[[str], None], *, owns_external: bool = True) -> None:
    """Move streams and the actors' snapshots to `lost/epoch_<number>/`, with an account of every rollout.

    Checkpoints, exports and metrics stay. After a kill half-way, call it again.

    Args:
        owns_external: delete the streams of an external redis. Only one node of a run may do so.
    """
    number = read_epoch(run_dir).number
    lost = lost_folder(run_dir, number)
    make_folder(lost)
    write_account(run_dir, lost)
    if config.streams.backend == "redis" and config.streams.external and owns_external:
        delete_external(run_dir, config)
    for path in (run_dir / "streams", *run_dir.glob("redis_*/data"), *run_dir.glob("actor_*/progress.msgpack")):
        _set_aside(path, lost / path.relative_to(run_dir))
    if (run_dir / EPOCH_FILE).exists():
        shutil.copyfile(run_dir / EPOCH_FILE, lost / EPOCH_FILE)
    write_epoch(run_dir, StreamEpoch(number=number + 1))
    say(f"new streams behind the newest good checkpoint; the old ones are in {lost}: delete it when you do not need it")


def has_records(run_dir: Path, config: Config, topic: str | None = None) -> bool:
    """Whether this folder's streams have records of ``topic`` (None: any). Not for the run's own redis, not up yet."""
    backend_from_config(config, run_dir)
    backend = get_streams_backend()
    return any(backend.stats(spec).next_offset for spec in backend.specs(run_dir) if topic in (None, spec.topic))


def check_packing(run_dir: Path, config: Config, world: WorldMap) -> None:
    """Refuse micro-batches that an earlier launch has packed for other trainer ranks.

    Raises:
        ConfigError: the number of ranks, or of those that share a micro-batch, has changed.
    """
    # Each rank reads its own partition: some would not be trained with fewer ranks, or several times without sharing.
    mode = config.debug.mode
    if mode not in (None, *READS):  # a mode that packs nothing, and reads nothing that is packed
        return
    try:
        before = WorldMap.load(run_dir)
    except WorldError:  # that launch ended before it had one
        return
    ranks, shared = world.trainer_world_size, config.finetune.seq_parallel
    changed = []
    if before.trainer_world_size != ranks:
        changed.append(
            f"the trainer's ranks (`world.finetune_fraction`) were {before.trainer_world_size} and are {ranks}"
        )
    if (shared_before := load_old_run(run_dir).finetune.seq_parallel) != shared:
        changed.append(f"`finetune.seq_parallel` was {shared_before} and is {shared}")
    if changed and (config.streams.backend == "redis" or has_records(run_dir, config, TRAINING_DATA)):
        from_checkpoint = "resume=checkpoint, which packs new ones behind the newest checkpoint"
        anew = from_checkpoint if mode is None else "force_restart=true"  # only a whole run has checkpoints
        raise ConfigError(
            f"`output_dir` is {str(run_dir)!r}: {', '.join(changed)}, but micro-batches in the streams are packed for "
            f"those of before; go on with the same, or set {anew}"
        )


def check_external(run_dir: Path, config: Config) -> None:
    """Refuse an external redis that would delete records by itself."""
    from pipelinerl.streams.redis import RedisBackend

    RedisBackend.from_config(config, run_dir).check_keeps_all()


def delete_external(run_dir: Path, config: Config) -> None:
    """Delete the streams of this folder on an external redis."""
    backend_from_config(config, run_dir)
    backend = get_streams_backend()
    for spec in backend.specs(run_dir):
        backend.delete(spec)


def write_account(run_dir: Path, lost: Path) -> None:
    """Write the streams' rollouts, evaluations and damage to the folder `lost`, unless it already has them."""
    if (lost / LEDGER_FILE).exists():
        return
    try:
        book = ledger.read_present(run_dir)
        (lost / LEDGER_FILE).write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in book.entries))
        with look_into(run_dir):
            _write_evaluations(run_dir, lost / EVALUATIONS_FILE)
            lines = verify.damage_lines(verify.verify(run_dir), run_dir)
            (lost / DAMAGE_FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except (PipelineRLError, OSError) as error:
        log.warning("event=old_streams_damaged reason=%s", error)
        (lost / DAMAGE_FILE).write_text(f"the streams cannot be read: {error}\n", encoding="utf-8")


def _write_evaluations(run_dir: Path, path: Path) -> None:
    spec = SingleStreamSpec(run_dir, EVALUATION)
    with open_reader(spec, EvaluationMessage, name=None, over_damage=True) as reader:
        found = [message for _, message in reader.read_all() if isinstance(message, EvaluationDone)]
    path.write_bytes(b"".join(msgspec.json.encode(message) + b"\n" for message in found))


def _set_aside(path: Path, target: Path) -> None:
    if path.exists() and not target.exists():
        make_folder(target.parent)
        path.rename(target)
        sync_path(target.parent)
        sync_path(path.parent)


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
    """Copy the topic that this run's roles read, from its first record, so that offsets are the same. Done once."""
    source, mode = source_of(config), config.debug.mode
    if source is None or mode is None:
        return
    topic = READS[mode]
    done = run_dir / "streams" / topic / COPIED
    if done.exists():
        return
    files = FilesBackend.from_config(config, run_dir)  # an interrupted copy starts again
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
