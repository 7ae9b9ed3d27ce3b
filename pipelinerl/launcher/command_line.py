"""The command line of `python -m pipelinerl.launch --config-name=quickstart output_dir=results/quickstart`.

A Hydra application over `conf/` that imports nothing heavy before the command line has been parsed. A refusal is one
message on stderr and exit code 2.
"""

import difflib
import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.config.paths import CONF_DIR, config_names, search_path
from pipelinerl.errors import EXIT_REFUSED, ConfigError, PipelineRLError
from pipelinerl.observability.logging import shown
from pipelinerl.world.process import process_restored

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from pipelinerl.config.sections import Config
    from pipelinerl.launcher.commands import CommandOf

QUIET_HYDRA = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra.job.chdir=false",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
OPTIONS_WITH_VALUE = (
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--package",
    "-p",
    "--cfg",
    "-c",
)
UNKNOWN_OVERRIDE = re.compile(r"Could not override '([^']+)'")


def main(argv: Sequence[str] | None = None, *, command_of: "CommandOf | None" = None) -> int:
    """Runs the command line (None: `sys.argv`) and returns the exit code.

    Args:
        command_of: builds the command that starts a role. None: the launcher's own.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return interruptible(lambda: _run_hydra(arguments, command_of))


def interruptible(program: Callable[[], int]) -> int:
    """Runs a program and returns its exit code: 128 + the signal's number if one comes before the launcher's loop."""
    with process_restored():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupt)
        try:
            return program()
        except Interrupted as interrupted:
            print("interrupted before anything was started", file=sys.stderr)
            return 128 + interrupted.number


class Interrupted(BaseException):
    """A stop signal arrived before the launcher's event loop handled it."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def _interrupt(number: int, _: object) -> None:
    raise Interrupted(number)


def _run_hydra(arguments: list[str], command_of: "CommandOf | None") -> int:
    import hydra
    import yaml
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    from pipelinerl.config.origin import make_examples_importable
    from pipelinerl.config.search import set_search_path

    if not arguments:
        return refuse("nothing to run: try `--config-name=quickstart`, or name your own with `output_dir=...`")
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return 0
    config_dir, arguments = take_config_dir(arguments)
    if config_dir and not Path(config_dir).is_dir():
        return refuse(f"--config-dir={config_dir}: there is no such folder")
    set_search_path(config_dir)
    make_examples_importable()
    codes: list[int] = []
    composed: list[DictConfig] = []

    @hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name="base")
    def task(cfg: "DictConfig") -> None:
        from pipelinerl.launcher.program import launch

        composed.append(cfg)
        hydra_cfg = HydraConfig.get()
        overrides = list(hydra_cfg.overrides.task)
        if hydra_cfg.mode == RunMode.MULTIRUN and shares_folder(cfg, arguments):
            fix = "name a swept key in it, as in 'output_dir=results/${seed}'"
            codes.append(
                codes[0] if codes else refuse(f"all runs of --multirun share output_dir={cfg.output_dir}; {fix}")
            )
            return
        try:
            codes.append(launch(cfg, overrides, **({"command_of": command_of} if command_of else {})))
        except PipelineRLError as error:
            codes.append(refuse(str(error)))

    sys.argv = [sys.argv[0], *hydra_arguments(arguments)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    try:
        task()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        return refuse(explain_refusal(error, config_names(config_dir)))
    except Exception as error:  # what Python raises inside Hydra, where a file is no configuration
        if composed:
            raise
        return refuse(explain_file(error, config_dir))
    return max(codes, default=0)


HELP = """\
python -m pipelinerl.launch --config-name=NAME key=value …: start an experiment, or resume it by the same line

  pipelinerl launch --config-name=quickstart output_dir=results/quickstart finetune.max_train_steps=80

Configurations are YAML files in conf/ of the working directory or of the package (`pipelinerl --help` lists them;
--config-dir=FOLDER names another place). The keys to know:

{keys}

dry_run=true prints world, commands, memory plan and warnings, and starts nothing. --cfg job prints every key as it is
set, docs/configuration.md explains all of them, and --hydra-help has Hydra's own options, as --multirun.\
"""
KEYS_TO_KNOW = (
    "output_dir",
    "model_path",
    "dataset_loader",
    "actor.rollout_policy",
    "attempts",
    "llm.parameters",
    "finetune.max_train_steps",
    "finetune.gradient_accumulation_passes",
    "finetune.learning_rate",
    "max_lag_steps",
)


def help_text() -> str:
    """The ten keys of a first experiment and where to read on."""
    from pipelinerl.config.keys import declared
    from pipelinerl.config.sections import Config

    meanings = {key.name: key.meaning.partition(". ")[0] for key in declared(Config)}
    width = max(map(len, KEYS_TO_KNOW))
    return HELP.format(keys="\n".join(f"  {name:<{width}}  {meanings[name]}" for name in KEYS_TO_KNOW))


def shares_folder(cfg: "DictConfig", arguments: Sequence[str]) -> bool:
    """Whether all runs of a sweep would have one folder."""
    from omegaconf import OmegaConf

    is_swept = any(argument.lstrip("+").startswith("output_dir=") and "," in argument for argument in arguments)
    return not is_swept and not (
        OmegaConf.is_missing(cfg, "output_dir") or OmegaConf.is_interpolation(cfg, "output_dir")
    )


def refuse(message: str) -> int:
    print(f"error: {shown(message)}", file=sys.stderr)
    return EXIT_REFUSED


def take_config_dir(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Returns the value of `--config-dir` and the other arguments."""
    found, rest = None, []  # if Hydra saw the option, packaged names would win over that folder
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            found = value if equals else next(waiting, None)
        else:
            rest.append(argument)
    return found, rest


def hydra_arguments(arguments: Sequence[str]) -> list[str]:
    """Rewrites the user's arguments for Hydra, which then writes no files of its own."""
    options: list[str] = []  # first, because Hydra's parser needs all overrides next to each other
    overrides: list[str] = []
    waiting_for_value = False
    for argument in arguments:
        if waiting_for_value or argument.startswith("-"):
            options.append(argument)
            waiting_for_value = not waiting_for_value and argument in OPTIONS_WITH_VALUE
        else:
            overrides.append(with_right_plus(argument))
    return [*options, *overrides, *QUIET_HYDRA]


def with_right_plus(override: str) -> str:
    """`+dry_run=true` → `dry_run=true`: Hydra refuses to add a key that exists.

    `parameters={a: 1}` → `+parameters={a: 1}`: else Hydra refuses every key that the mapping does not have yet.
    `use_fsdp=true` → `++use_fsdp=true`: `base` does not have other names of a key.
    """
    from pipelinerl.config.load import config_keys
    from pipelinerl.config.names import addable

    given = re.match(r"\+?(?P<key>[\w.]+)=(?P<opens>\s*\{)?", override)
    if given is None or (given["key"] not in config_keys()):
        return addable(override)
    return ("+" if given["opens"] else "") + override.removeprefix("+")


def quoted(text: str) -> str:
    """Returns a text as a quoted value of Hydra's grammar.

    >>> quoted("runs/a, b")
    '"runs/a, b"'
    """
    before_quote = re.compile(r'(\\*)("|$)')  # only there Hydra's grammar takes backslashes for escapes
    return '"' + before_quote.sub(lambda end: end[1] * 2 + ('\\"' if end[2] else ""), text) + '"'


def composed(config_name: str, overrides: Sequence[str], config_dir: Path | None) -> tuple[dict[str, Any], "Config"]:
    """Returns an experiment's configuration, plain and typed. The arguments and errors are ``composed_container``'s."""
    from pipelinerl.config.load import parse_container

    container = composed_container(config_name, overrides, config_dir)
    return container, parse_container(container)


def composed_container(
    config_name: str, overrides: Sequence[str], config_dir: Path | None, *, may_miss: bool = True
) -> dict[str, Any]:
    """Returns an experiment's configuration as plain values, for a command that starts no run.

    Args:
        may_miss: keys that a run must be given may be missing.

    Raises:
        ConfigError: the configuration cannot be composed, or holds a secret.
    """
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    from pipelinerl.config.load import compose, missing_keys, to_container
    from pipelinerl.config.origin import absolute
    from pipelinerl.config.variables import check_secrets

    try:
        cfg = compose(config_name, list(map(with_right_plus, overrides)), config_dir, own=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(explain_refusal(error, config_names(config_dir))) from error
    for key in missing_keys(cfg) if may_miss else ():
        OmegaConf.update(cfg, key, "not-given")
    container = absolute(to_container(cfg), Path.cwd())
    check_secrets(container)
    return container


def explain_refusal(error: Exception, names: Sequence[str] = ()) -> str:
    """Describes an error of Hydra, OmegaConf or PyYAML in one line, with a suggestion.

    Args:
        names: the configurations that exist.
    """
    from hydra.errors import MissingConfigException, OverrideParseException
    from yaml import MarkedYAMLError

    from pipelinerl.config.load import is_free_form, suggestion
    from pipelinerl.config.renames import rename_of
    from pipelinerl.launcher.vllm_options import fault_of

    text = str(error)
    unknown = UNKNOWN_OVERRIDE.search(text)
    if unknown:
        key = unknown.group(1)
        if is_free_form(key) and not rename_of(key):
            return fault_of(key) or explain_new_key(key, siblings_of(error))
        return f"`{key}` is not a configuration key{suggestion(key)}"
    if isinstance(error, OverrideParseException):
        meant = difflib.get_close_matches(error.override, names, n=1, cutoff=0.8)
        if meant:
            return (
                f"`{error.override}` is not of the form key=value; a configuration is named by --config-name={meant[0]}"
            )
        return explain_override(error.override)
    if isinstance(error, MissingConfigException) and "primary config" in text:
        name = str(error.missing_cfg_file).removesuffix(".yaml")
        near = difflib.get_close_matches(name, names, n=len(names), cutoff=0.4)
        others = [other for other in names if other not in near]
        return f"there is no configuration {name!r}; there are {', '.join([*near, *others])}"
    if isinstance(error, MissingConfigException) and error.options:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        near = difflib.get_close_matches(name, error.options, n=1)
        told = f"; did you mean `{near[0]}`?" if near else f": it may be {', '.join(error.options)}"
        return f"`{group}={name}`: there is no file {name}.yaml in conf/{group}{told}"
    if isinstance(error, MarkedYAMLError) and error.problem_mark:
        mark = error.problem_mark
        return f"{mark.name}:{mark.line + 1}: not valid YAML: {error.problem}"
    return " ".join(line.strip() for line in text.splitlines() if line.strip())


def explain_file(error: Exception, config_dir: str | None) -> str:
    """Describes an error that Python raised while Hydra read a file of the configuration."""
    files = [path for folder in search_path(config_dir) for path in sorted(folder.rglob("*.yaml")) if path.is_file()]
    if isinstance(error, UnicodeDecodeError):
        wrong = [str(path) for path in files if error.object in path.read_bytes()]
        return f"{', '.join(wrong) or 'a configuration'} is not text in UTF-8: save it so ({error})"
    fix = "; write `defaults: [base, _self_]`" if "defaults" in str(error) else ""
    told = " ".join(str(error).split()) or type(error).__name__
    return f"the configuration cannot be composed: {told}{fix}"


def siblings_of(error: Exception) -> list[str]:
    """The keys of the section in which an override's key is unknown."""
    section = getattr(error.__cause__, "parent_node", None)
    return [str(name) for name in section] if isinstance(section, Mapping) else []


def explain_new_key(key: str, siblings: Sequence[str]) -> str:
    """Explains an unknown key of a section that takes keys of the user's own."""
    section, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if near:
        return (
            f"`{key}` is not in the configuration; did you mean `{section}.{near[0]}`? A new key is added with +{key}=…"
        )
    return f"`{key}` is not in the configuration yet: add it with +{key}=…"


def explain_override(override: str) -> str:
    """Explains how to fix an override that Hydra's grammar does not accept."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"`{override}` is not of the form key=value; a value with spaces needs quotes: 'output_dir=\"my run\"'"
    return f"`{override}` cannot be read: quote the value: '{key}=\"{value}\"'"
