"""`resume=checkpoint`: sets the run's streams aside. New streams begin after the newest good checkpoint.

The outcome of every rollout is written down as far as the streams can be read. Then the streams and the actors'
snapshots move to `lost/epoch_<number>/`. Checkpoints, exports and metrics stay. The trainer finds the newest good
checkpoint and tells the actors, whose new streams begin after the rollouts that the checkpoint has resolved.
"""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipelinerl.config.debug import READS
from pipelinerl.config.load import load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, PipelineRLError, WorldError
from pipelinerl.inspect import ledger, verify
from pipelinerl.inspect.reading import look_into
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
from pipelinerl.world import WorldMap
from pipelinerl.world.disk import make_folder, sync_path

log = logging.getLogger(__name__)

DAMAGE_FILE = "damage.txt"


def begin_epoch(run_dir: Path, config: Config, say: Callable[[str], None], *, owns_external: bool = True) -> None:
    """Set the present streams aside and begin a new epoch. If it is killed half-way, call it again.

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
    """Whether there are streams of this folder with records, of ``topic`` (None: of any).

    For streams that are not on the run's own redis, which does not run before the roles.
    """
    backend_from_config(config, run_dir)
    backend = get_streams_backend()
    return any(backend.stats(spec).next_offset for spec in backend.specs(run_dir) if topic in (None, spec.topic))


def check_packing(run_dir: Path, config: Config, world: WorldMap) -> None:
    """Refuse micro-batches that an earlier launch has packed for other trainer ranks.

    Each rank reads its own partition. With fewer ranks, what lies in the others would not be trained. Of ranks that no
    longer share micro-batches, each would train them.

    Raises:
        ConfigError: the number of ranks, or of those that share a micro-batch, is another one.
    """
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
            lines = verify.finding_lines(verify.verify(run_dir), run_dir)
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
