"""From Hydra's composed `DictConfig` or a run folder to the frozen, typed `Config`.

Every refusal is a `ConfigError` that names key, value, constraint and fix. Nothing is repaired silently.
"""

import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from pipelinerl.config.keys import REQUIRED, declared
from pipelinerl.config.names import addable, explain_missing, with_one_name
from pipelinerl.config.nested import ABSENT, value_at, with_settings, without
from pipelinerl.config.origin import make_importable, with_moved_paths
from pipelinerl.config.paths import CONF_DIR, RUN_ADDRESS, RUN_CONFIG
from pipelinerl.config.renames import hint, rename_of
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import with_plain_options
from pipelinerl.config.units import in_steps
from pipelinerl.config.variables import check_secrets, references
from pipelinerl.errors import ConfigError

UNITS = {
    "_ms": "milliseconds",
    "_s": "seconds",
    "_minutes": "minutes",
    "_kb": "kilobytes",
    "_mb": "megabytes",
    "_tokens": "tokens",
    "_chars": "characters",
    "_steps": "optimizer steps",
}
"""The unit of a key's number, by the end of its name."""


def validate(cfg: DictConfig) -> Config:
    """Check types, bounds, unknown keys and the rules across sections."""
    from pipelinerl.config import rules

    container = to_container(cfg)
    check_secrets(container)
    config = parse_container(container)
    rules.check_rules(config)
    return config


def parse(cfg: DictConfig) -> Config:
    """Types, bounds and unknown keys only."""
    return parse_container(to_container(cfg))


def to_container(cfg: DictConfig) -> dict[str, Any]:
    """Returns plain nested dictionaries with every interpolation resolved, and every setting under its one name.

    The key `hydra` is left out.
    """
    try:
        missing = missing_keys(cfg)
        if missing:
            raise ConfigError(must_be_given(missing))
        container = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"`{error.full_key}` cannot be resolved: {reason}{explain_missing(reason)}") from error
    assert isinstance(container, dict)
    container.pop("hydra", None)
    return with_one_name({str(key): value for key, value in container.items()})


def missing_keys(cfg: DictConfig) -> list[str]:
    """Keys that the experiment must give and does not. One that refers to another is not looked at itself."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    return sorted(key for key in _missing_in(plain, "") if not key.startswith("hydra"))


def _missing_in(value: Any, key: str) -> Iterator[str]:
    if value == MISSING:
        yield key
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _missing_in(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _missing_in(item, f"{key}[{place}]")


def must_be_given(missing: Sequence[str]) -> str:
    keys = ", ".join(f"`{key}`" for key in missing)
    return f"{keys} must be given: set {missing[0]}=... on the command line or in the experiment's YAML"


def parse_container(container: dict[str, Any]) -> Config:
    """Types, bounds and unknown keys of a configuration that `to_container` has made."""
    try:
        return Config.model_validate(with_plain_options(in_steps(without_extra_keys(container))))
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(item) for item in error.errors(include_url=False))) from error


def without_extra_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the keys of the domain's own, which `extra_keys` names.

    Raises:
        ConfigError: `extra_keys` names a key that is not there, or one of the project.
    """
    given = container.get("extra_keys")
    own = [str(key) for key in given] if isinstance(given, list) else []
    known = set(config_keys())
    rest = dict(container)
    for key in own:
        if key in known or is_free_form(key):
            raise ConfigError(f"`extra_keys` has {key!r}, which is a key of the project: remove it from the list")
        if value_at(rest, key, ABSENT) is ABSENT:
            raise ConfigError(f"`extra_keys` has {key!r}, which has no value: give it one, or remove it from the list")
        rest = without(rest, key)
    around = {".".join(key.split(".")[:n]) for key in own for n in range(1, key.count(".") + 1)}
    for section in sorted(around - known, reverse=True):  # an inner one before the one around it
        if not value_at(rest, section):
            rest = without(rest, section)
    return rest


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"`{key}` is not a configuration key{suggestion(key)}"
    if item["type"] == "missing":
        if is_free_form(key):  # of an entry that `base` does not have
            return f"`{key}` must be given"
        return f"`{key}` is missing: start the experiment's YAML with `defaults: [base, _self_]` or set it"
    unit = next((name for end, name in UNITS.items() if key.endswith(end)), None)
    if unit and isinstance(item["input"], str):
        return f"`{key}` is {item['input']!r}: it is a number of {unit}, without a unit"
    constraint = item["msg"].removeprefix("Input ").removeprefix("Value error, ")
    return f"`{key}` is {item['input']!r}: it {constraint}"


def config_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key of the typed configuration."""
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys.extend(config_keys(field.annotation, f"{prefix}{name}."))
    return keys


def is_free_form(key: str) -> bool:
    """Whether a key lies in a section whose keys are the user's (sampling parameters, loader parameters, …)."""
    section: Any = Config
    for part in key.split("."):
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return True
        if part not in section.model_fields:
            return False
        section = section.model_fields[part].annotation
    return False


def nearest_key(key: str, known: Iterable[str] | None = None) -> str | None:
    """The known key that the unknown one most likely means: same last part elsewhere, else the nearest spelling."""
    candidates = list(known if known is not None else config_keys())
    last = key.rpartition(".")[2]
    same_name = [candidate for candidate in candidates if candidate.rpartition(".")[2] == last]
    if same_name:
        return max(same_name, key=lambda candidate: difflib.SequenceMatcher(None, key, candidate).ratio())
    close = difflib.get_close_matches(key, candidates, n=1, cutoff=0.7)
    if close:
        return close[0]
    by_last = {candidate.rpartition(".")[2]: candidate for candidate in candidates}
    close = difflib.get_close_matches(last, by_last, n=1, cutoff=0.7)
    return by_last[close[0]] if close else None


def suggestion(key: str) -> str:
    """Returns the known key that an unknown one means: a key of PipelineRL by the table, any other by its spelling."""
    row = rename_of(key)
    if row:
        return f"; {hint(row)}"
    own = f"; a key of your domain's own belongs into `extra_keys: [{key}]`"
    nearest = nearest_key(key)
    return f"; did you mean `{nearest}`?" if nearest else f"; `--cfg job` prints all keys{own}"


DAMAGED = "restore it, or start over with force_restart=true"


def load_run_dictconfig(run_dir: Path | str) -> DictConfig:
    """The resolved configuration of a run folder, as the domain's rollout function receives it.

    Paths within a folder that was moved follow it, and the run's own modules can be imported from then on.
    """
    return OmegaConf.create(_run_container(Path(run_dir)))


def _run_container(run_dir: Path) -> dict[str, Any]:
    path = run_dir / RUN_CONFIG
    if not path.is_file():
        raise ConfigError(f"`{run_dir}` is not a run folder: {RUN_CONFIG} is missing; start it with pipelinerl.launch")
    make_importable(run_dir)
    try:
        container = _read_container(path)
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}; {DAMAGED}") from error
    references(container)  # from here on no log of this process shows their values
    if (run_dir / RUN_ADDRESS).is_file():
        return container  # of a run elsewhere: the paths are those of its launcher
    return with_moved_paths(container, run_dir)


def _read_container(path: Path) -> dict[str, Any]:
    """As `to_container` of what OmegaConf loads, which takes ten times as long where nothing is left to resolve."""
    text = path.read_text(encoding="utf-8")
    container = yaml.load(text, _yaml_loader())
    if not isinstance(container, dict):
        raise ConfigError(f"{path} is not the configuration of a run: it must hold a mapping of keys; {DAMAGED}")
    if "${" in text or MISSING in text:
        return to_container(OmegaConf.create(container))
    container.pop("hydra", None)
    return with_one_name({str(key): value for key, value in container.items()})


@functools.cache
def _yaml_loader() -> type:
    """OmegaConf's rules of YAML on libyaml, where PyYAML has it."""
    rules = get_yaml_loader()
    parser: Any = yaml.cyaml.CParser if yaml.__with_libyaml__ else None
    if parser is None:
        return rules

    class Loader(parser, rules):  # type: ignore[misc, valid-type]
        def __init__(self, stream: str):
            parser.__init__(self, stream)
            yaml.constructor.SafeConstructor.__init__(self)
            yaml.resolver.Resolver.__init__(self)

    return Loader


def load_run(run_dir: Path | str) -> Config:
    """The typed configuration of a run folder."""
    return parse_container(_run_container(Path(run_dir)))


BEFORE_KEYS = {"finetune.share_prefixes": "off"}
"""What runs did before these keys came, where it is not the default."""


def load_old_run(run_dir: Path | str) -> Config:
    """The configuration of a run folder that another version of this project may have written, for reading the run.

    Keys that came since have their defaults or what `BEFORE_KEYS` says, and keys that are gone are left out.
    """
    return parse_container(with_today_keys(_run_container(Path(run_dir))))


def with_today_keys(container: Mapping[str, Any]) -> dict[str, Any]:
    """A resolved configuration with exactly today's keys, without the domain's own."""
    absent = {key.name: key.default for key in declared(Config)} | BEFORE_KEYS
    values = {name: value_at(container, name, otherwise) for name, otherwise in absent.items()}
    given = {name: value for name, value in values.items() if value != REQUIRED} | {"extra_keys": []}
    filled = with_settings({}, given)
    return to_container(OmegaConf.create(filled)) if "${" in str(filled) else with_one_name(filled)


def compose(
    config_name: str = "base", overrides: Sequence[str] = (), config_dir: Path | None = None, *, own: bool = False
) -> DictConfig:
    """Composes a configuration as the command line does, for tools and tests.

    Args:
        config_dir: a folder that is searched before the packaged one.
        own: search the working directory's `conf/` first, as `pipelinerl.launch` does.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    from pipelinerl.config.search import set_search_path

    set_search_path(str(config_dir) if config_dir else None, own=own)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return hydra_compose(config_name, overrides=list(map(addable, overrides)))
