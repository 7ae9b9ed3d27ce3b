"""The run folder belongs to one experiment and to one launcher at a time.

`claim` locks it and refuses other contents. `write_run_dir` publishes configuration, world and start scripts. All files
and folders have modes 0600 or 0700, because of the launcher's umask, which the roles inherit.
"""

import fcntl
import fnmatch
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
from omegaconf import OmegaConf

from pipelinerl.config.load import load_old_run, load_run_dictconfig, parse_container, to_container
from pipelinerl.config.origin import absolute, copy_of, origin_document
from pipelinerl.config.paths import (
    CHECKPOINTS,
    CURVE_FILE,
    DEBUG_RUN_FILE,
    ENDING_FILE,
    EXPORTS,
    LOCK_FILE,
    METRICS,
    PROFILES,
    REPORT_FILE,
    RUN_CONFIG,
    RUN_ORIGIN,
    SUMMARY_FILE,
    TIMELINE_FILE,
)
from pipelinerl.config.resume import differing_keys
from pipelinerl.config.servers import max_model_len
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.debug_run import read_debug_run
from pipelinerl.inspect.report import read_summary
from pipelinerl.launcher.commands import RoleCommand, start_script
from pipelinerl.launcher.run_plan import RunPlan
from pipelinerl.membership.stores import FOLDER
from pipelinerl.plan.model_shape import find_longrope_limit
from pipelinerl.streams.epoch import EPOCH_FILE, LOST_FOLDER
from pipelinerl.world.disk import make_folder, replace_file

LOCK_POLL_S = 0.1
"""A start is delayed by no more than this beyond the reaper's end."""
REAPER_WAIT_S = 60.0
"""Processes of a killed run end within seconds (`reaper`). One in a call of a slow file system may take longer."""
LOG_FILE = "launcher.log"
OF_LAUNCHERS = ("launcher.[0-9]*.log", "launcher*.log.1", ".launch-*")
"""Logs of the launchers of other nodes, full logs, and markers that killed launchers have left."""
OF_FILE_SYSTEM = "lost+found"
"""The only entry of a fresh ext4 volume."""
OWNED = (
    "conf",
    "status",
    METRICS,
    "streams",
    CHECKPOINTS,
    EXPORTS,
    "archive",
    "traces",
    PROFILES,
    TIMELINE_FILE,
    "tensorboard",
    "hangs",
    FOLDER,
    "wandb",
    LOST_FOLDER,
    EPOCH_FILE,
    LOG_FILE,
    SUMMARY_FILE,
    DEBUG_RUN_FILE,
    ENDING_FILE,
    CURVE_FILE,
    REPORT_FILE,
)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The locked run folder. The lock is released when `lock` is closed or the process ends."""

    path: Path
    resumed: bool
    finished: bool
    """Whether this experiment has been trained to its last step and summarised."""
    lock: IO[str]
    made: tuple[Path, ...] = ()
    """Files, and at last the folder itself, that were not there before."""


@contextmanager
def holding(claim: Claim) -> Iterator[None]:
    """Hold the folder. If no run was written into it, files that were made for the start are deleted."""
    with claim.lock:
        try:
            yield
        finally:
            if not (claim.path / RUN_CONFIG).is_file():
                with suppress(OSError):  # others have put something into the folder
                    for made in claim.made:
                        made.rmdir() if made == claim.path else made.unlink(missing_ok=True)


def claim(path: Path, container: Mapping[str, Any], *, force_restart: bool) -> Claim:
    """Lock the folder and check that it is empty or holds this experiment.

    Args:
        container: the configuration of this experiment.
        force_restart: delete the run that the folder holds.

    Raises:
        ConfigError: the folder holds something else, cannot be written, or is used by another launcher.
    """
    owned = check_folder(path, container, force_restart=force_restart)
    made = tuple(part for part in (path / LOG_FILE, path / LOCK_FILE, path) if not part.exists())
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = open(path / LOCK_FILE, "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"`output_dir` is {str(path)!r}: it cannot be written ({error.strerror})") from error
    try:
        take_lock(lock, path)
        if force_restart:
            clear(path, owned)
        resumed = (path / RUN_CONFIG).is_file()
        if resumed:
            check_same_experiment(path, container)
            check_no_copy(path, container)
    except BaseException:
        lock.close()
        raise
    finished = resumed and is_finished(path, container["finetune"]["max_train_steps"])
    return Claim(path=path, resumed=resumed, finished=finished, lock=lock, made=made)


def take_lock(lock: IO[str], path: Path) -> None:
    """Take the lock and write this process's identity into it. Waits for the reaper of a launcher that was killed."""
    deadline = time.monotonic() + REAPER_WAIT_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if is_alive(lock):
                raise ConfigError(f"`output_dir` is {str(path)!r}: another launcher is running in it") from error
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"`output_dir` is {str(path)!r}: processes of the run that was killed in it have not ended within "
                    f"{REAPER_WAIT_S:g} s"
                ) from error
            time.sleep(LOCK_POLL_S)
    lock.truncate(0)
    lock.write(f"{os.getpid()} {psutil.Process().create_time()}")
    lock.flush()


def is_alive(lock: IO[str]) -> bool:
    """Whether the last launcher that took the lock is alive."""
    lock.seek(0)
    pid, _, created = lock.read().partition(" ")  # nothing: it has the lock and is about to write
    try:
        return not created or psutil.Process(int(pid)).create_time() == float(created)
    except psutil.NoSuchProcess:
        return False


def check_folder(path: Path, container: Mapping[str, Any], *, force_restart: bool) -> tuple[str, ...]:
    """Refuse a folder that is not this experiment's. Returns the names that belong to its run and writes nothing.

    Args:
        container: the configuration of this experiment.
        force_restart: accept a folder with another experiment.

    Raises:
        ConfigError: the folder is refused.
    """
    owned = (*OWNED, *built_model(path, container))
    check_recognised(path, owned)
    if (path / RUN_CONFIG).is_file() and not force_restart:
        check_same_experiment(path, container)
    return owned


def is_finished(path: Path, max_train_steps: int) -> bool:
    """Whether the folder's summary covers at least `max_train_steps`, or its standalone roles have ended."""
    if read_debug_run(path) is not None:
        return True
    summary = read_summary(path)
    return summary is not None and summary["optimizer_steps"] >= max_train_steps


def holds_finished(path: Path, container: Mapping[str, Any], *, force_restart: bool) -> bool:
    """Whether the folder holds this experiment, trained to its last step, for nodes that do not claim the folder."""
    if force_restart or not (path / RUN_CONFIG).is_file():
        return False
    try:
        check_same_experiment(path, container)
    except ConfigError:
        return False  # node 0 says why
    return is_finished(path, container["finetune"]["max_train_steps"])


def built_model(path: Path, container: Mapping[str, Any]) -> tuple[str, ...]:
    """Name of the tiny model's folder if it is directly inside the run folder, otherwise nothing."""
    model = Path(container["model_path"]).resolve()
    return (model.name,) if container["tiny_model"] and model.parent == path else ()


def check_recognised(path: Path, owned: Collection[str]) -> None:
    """Refuse a folder with contents that no launcher wrote."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"`output_dir` is {str(path)!r}: that is a file; choose a folder")
    if not path.is_dir() or (path / RUN_CONFIG).is_file():
        return
    known = (*owned, LOCK_FILE, OF_FILE_SYSTEM)
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in known)
    foreign = [name for name in foreign if not (is_job_folder(path / name) or is_of_launchers(path / name))]
    if foreign:
        listed = ", ".join(foreign[:3])
        raise ConfigError(f"`output_dir` is {str(path)!r}: it holds {listed} and no run; choose a new or empty folder")


def is_job_folder(path: Path) -> bool:
    return fnmatch.fnmatch(path.name, "*_[0-9]*") and (path / "start.sh").is_file()


def is_of_launchers(path: Path) -> bool:
    return any(fnmatch.fnmatch(path.name, pattern) for pattern in OF_LAUNCHERS)


def clear(path: Path, owned: Collection[str]) -> None:
    """Delete the files of a run, and no others."""
    others = [entry for entry in path.iterdir() if is_job_folder(entry) or is_of_launchers(entry)]
    for entry in [*others, *(path / name for name in owned)]:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def check_same_experiment(path: Path, container: Mapping[str, Any]) -> None:
    """Refuse a folder whose experiment has other settings. The message names up to three of them."""
    saved = absolute(to_container(load_run_dictconfig(path)), Path.cwd())
    differing = differing_keys(saved, container)
    if differing:
        shown = ", ".join(f"`{key}` was {old!r} and is {new!r}" for key, old, new in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"`output_dir` is {str(path)!r}: it holds another experiment ({shown}{more}); use the same settings to "
            "resume it, another folder, or force_restart=true to delete it and start over"
        )
    check_same_rope(path, container)


def check_same_rope(path: Path, container: Mapping[str, Any]) -> None:
    """Refuse to go on with other factors of longrope, with which the same weights are another policy."""
    limit = find_longrope_limit(container["model_path"])
    if limit is None:
        return
    before, now = max_model_len(load_old_run(path)), max_model_len(parse_container(dict(container)))
    if before is not None and now is not None and (before > limit) != (now > limit):
        raise ConfigError(
            f"`vllm_config.vllm_kwargs.max_model_len` was {before} and is {now}: the model's "
            f"original_max_position_embeddings, {limit}, is between them, so the policy would go on with other factors "
            "of longrope than it was trained with; keep it on its side, or begin a new run"
        )


def check_no_copy(path: Path, container: Mapping[str, Any]) -> None:
    """Refuse to go on with a copy of a run whose streams are on a server that the original uses, too."""
    original = copy_of(path) if container["streams"]["external"] else None
    if original is not None:
        raise ConfigError(
            f"`output_dir` is {str(path)!r}, a copy of {str(original)!r}, whose streams on the external redis it would "
            "share: go on in the original, or remove it first if this folder takes its place"
        )


def write_run_dir(plan: RunPlan) -> None:
    """Write configuration, world map and one folder per role. Deletes the leases of an earlier launch."""
    path = plan.path
    shutil.rmtree(path / FOLDER, ignore_errors=True)
    make_folder((path / RUN_CONFIG).parent)
    replace_file(path / RUN_CONFIG, OmegaConf.to_yaml(OmegaConf.create(plan.container)), mode=0o600, sync=True)
    replace_file(path / RUN_ORIGIN, origin_document(path), mode=0o600, sync=True)
    plan.world.save(path)
    write_roles(path, plan.commands)


def write_roles(path: Path, commands: Iterable[RoleCommand]) -> None:
    """Make one folder with a start script for each role."""
    for command in commands:
        folder = path / command.name
        make_folder(folder)
        replace_file(folder / "start.sh", start_script(command, Path.cwd()), mode=0o700)


def mark_folder(path: Path) -> Path:
    """Make an empty file by which another node finds out whether it shares this folder."""
    marker = path / f".launch-{secrets.token_hex(8)}"
    marker.touch(mode=0o600)
    return marker


def why_not_writable(path: Path) -> str | None:
    """Return why the folder cannot be written, such as a disk that became read-only. None: it can."""
    try:
        with tempfile.TemporaryFile(dir=path):
            return None
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
