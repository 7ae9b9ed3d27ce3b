"""A whole `conf/` folder of PipelineRL: every experiment in it, composed as PipelineRL's Hydra composes it.

With PipelineRL's `base.yaml` in the folder, which the user may have changed, each experiment becomes one file that
stands alone: its composed values that differ from ours. Without it the files are migrated one by one, and derive from
each other as before.
"""

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelinerl.config.load import compose as compose_ours
from pipelinerl.config.migrate.migration import EXTRA_KEYS, TEXTS, Migration, migrate
from pipelinerl.config.nested import ABSENT, value_at
from pipelinerl.config.renames import rename_of
from pipelinerl.config.search import set_search_path
from pipelinerl.errors import ConfigError

BASE = "base.yaml"
GLOBAL = re.compile(r"^#\s*@package\s+_global_", re.MULTILINE)
REFERENCE = re.compile(r"\$\{([^{}:]+)\}")
DOMAIN = ("actor.rollout_policy", "dataset_loader")
"""What an experiment names."""
LAG = "max_lag_steps"
IS_PART = "it is no experiment by itself, because it names no domain or has no base"
IS_TAKEN = "another file has the name that it would get"


@dataclass
class MigratedFolder:
    """The experiments of a folder, and what could not be migrated."""

    experiments: dict[str, Migration]
    """By the name of the new file, without suffix."""
    left_out: dict[str, str] = field(default_factory=dict)
    """File that is no experiment → reason."""
    missing: list[str] = field(default_factory=list)
    """Lines about keys of `base.yaml` without an equivalent, which the experiments do not repeat."""


def migrate_folder(folder: Path) -> MigratedFolder:
    """Migrates every experiment of a folder.

    Raises:
        ConfigError: the folder has no YAML file, or one cannot be read.
    """
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ConfigError(f"{folder} has no experiment: no file `*.yaml`")
    if not (folder / BASE).exists():
        return MigratedFolder(_one_by_one(files))
    return _composed(folder, [*files, *_global_files(folder)])


def migrate_file(path: Path) -> Migration:
    """Migrates one experiment as `migrate_folder` does, with the files beside it that it derives from.

    Raises:
        ConfigError: it cannot be read, or it is no experiment by itself.
    """
    experiment = read_experiment(path)
    folders = (
        (path.parent, path.parent.parent) if GLOBAL.search(path.read_text(encoding="utf-8")[:200]) else (path.parent,)
    )
    folder = next((folder for folder in folders if (folder / BASE).exists()), None)
    if folder is not None and path != folder / BASE:
        result = _composed(folder, [path])
        if not result.experiments:
            raise ConfigError(f"{path} is left out: {next(iter(result.left_out.values()))}")
        (new,) = result.experiments.values()
        new.missing += [f"base.yaml's {line}" for line in result.missing]
        return new
    if folder is None and EXTRA_KEYS in (new := migrate(experiment)).values:
        return _one_by_one(sorted(path.parent.glob("*.yaml")))[path.stem]
    return migrate(experiment)


def _global_files(folder: Path) -> Iterator[Path]:
    """Experiments in folders below, which have `@package _global_` at their top."""
    for path in sorted(folder.glob("*/*.yaml")):
        if GLOBAL.search(path.read_text(errors="replace", encoding="utf-8")[:200]):
            yield path


def _one_by_one(files: list[Path]) -> dict[str, Migration]:
    migrated = {path.stem: migrate(read_experiment(path)) for path in files}
    for name, new in migrated.items():
        if EXTRA_KEYS in new.values:  # the list here hides that of the parent
            new.values[EXTRA_KEYS] = [*dict.fromkeys(_inherited(name, migrated, frozenset()))]
    return migrated


def _inherited(name: str, migrated: Mapping[str, Migration], seen: frozenset[str]) -> Iterator[str]:
    """The keys of the domain's own in an experiment and in those that it derives from."""
    if name in seen or name not in migrated:
        return
    for parent in migrated[name].defaults:
        yield from _inherited(str(parent), migrated, seen | {name})
    yield from migrated[name].values.get(EXTRA_KEYS, [])


def _composed(folder: Path, files: list[Path]) -> MigratedFolder:
    ours = OmegaConf.to_container(compose_ours("base", ["finetune=pipelinerl"]), resolve=False)
    base = _migrated(_old(folder, BASE.removesuffix(".yaml")))
    base.changed.remove(TEXTS)  # which holds for some of the experiments
    result = MigratedFolder({}, missing=base.missing)
    for path in files:
        name = path.relative_to(folder).with_suffix("")
        to = "_".join(name.parts)
        try:
            cfg = _old(folder, str(name))
            is_whole = all(OmegaConf.select(cfg, key) for key in DOMAIN) and "finetune" in cfg
        except (ConfigError, OmegaConfBaseException) as error:
            result.left_out[str(name)] = " ".join(str(error).split())
            continue
        if not is_whole or to in result.experiments:
            result.left_out[str(name)] = IS_TAKEN if is_whole else IS_PART
            continue
        new = _migrated(cfg)
        known = [key for key, value in new.values.items() if value == value_at(ours, key, ABSENT)]
        new.forget(known, base)
        result.experiments[to] = new
    return result


def _old(folder: Path, name: str) -> DictConfig:
    """An experiment of the folder, as PipelineRL composes it. Raises ConfigError if it cannot be."""
    set_search_path(own=False)
    try:
        with warnings.catch_warnings(), initialize_config_dir(str(folder.absolute()), version_base="1.3"):
            warnings.simplefilter("ignore")  # a missing `_self_`, which PipelineRL does without
            return compose(name)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{name}.yaml cannot be composed: {' '.join(str(error).split())}") from error


def _migrated(cfg: DictConfig) -> Migration:
    new = migrate({"defaults": ["base"], **detached(cfg)})
    if new.values.get(LAG, 0) is None:
        new.forget([LAG])  # PipelineRL's default, which nobody chose
    return new


def detached(cfg: DictConfig) -> dict[str, Any]:
    """The configuration unresolved, but for references that only hold at their old place or to what is not here."""

    def inner(raw: Any, path: str) -> Any:
        if isinstance(raw, dict):
            return {name: inner(value, f"{path}.{name}" if path else str(name)) for name, value in raw.items()}
        if isinstance(raw, list):
            return [inner(value, f"{path}[{index}]") for index, value in enumerate(raw)]
        if isinstance(raw, str) and any(_is_bound(name) for name in REFERENCE.findall(raw)):
            with contextlib.suppress(OmegaConfBaseException):  # what has no value yet, as `output_dir`
                return OmegaConf.select(cfg, path)
        return raw

    return inner(OmegaConf.to_container(cfg, resolve=False), "")


def _is_bound(name: str) -> bool:
    row = rename_of(name)
    return name.startswith(".") or (row is not None and row.new is None and row.kind != "own")


def read_experiment(path: Path) -> dict[str, Any]:
    """An experiment's file, unresolved.

    Raises:
        ConfigError: it cannot be read, or holds no mapping.
    """
    try:
        old = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(old, dict):
        raise ConfigError(f"{path} is not an experiment: it must hold a mapping of keys")
    return {str(key): value for key, value in old.items()}
