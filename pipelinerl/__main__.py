"""The command `pipelinerl`, or `python -m pipelinerl`: runs the module of a program by a short name.

To add a command, add a line to `COMMANDS`.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from pipelinerl.config.environment import in_utf8
from pipelinerl.config.origin import make_examples_importable
from pipelinerl.config.paths import config_names, search_path
from pipelinerl.config.versions import installed_versions
from pipelinerl.errors import EXIT_REFUSED, told_in_one_line


class Command(NamedTuple):
    module: str
    """Module to run, as with `python -m`."""
    summary: str


COMMANDS = {
    "launch": Command("pipelinerl.launch", "start or resume an experiment: --config-name=NAME key=value …"),
    "resume": Command("pipelinerl.launcher.resume", "go on with the run in a folder, from any working directory"),
    "evaluate": Command("pipelinerl.launcher.evaluate", "pass@k of a model on an experiment's test problems"),
    "check": Command("pipelinerl.launcher.check_data", "which rows of your data a domain uses, and why not the others"),
    "doctor": Command("pipelinerl.launcher.doctor", "find rewards that can be gamed, before a run"),
    "status": Command("pipelinerl.status", "one screen about a run; its ledger; ask a server to leave"),
    "why": Command("pipelinerl.inspect.why", "why a run does not learn: ranked causes with their evidence"),
    "rollouts": Command("pipelinerl.inspect.rollouts", "what the model was asked and said: conversations of a run"),
    "report": Command("pipelinerl.inspect.page", "one HTML file about one or several runs"),
    "replay": Command("pipelinerl.inspect.replay", "compute an optimizer step again: each token's part of its loss"),
    "timeline": Command("pipelinerl.inspect.timeline", "what every process did when: for Perfetto, and as a picture"),
    "exporter": Command("pipelinerl.inspect.exporter", "a run's figures for Prometheus, and a Grafana dashboard"),
    "streams": Command("pipelinerl.streams", "the records of a run's streams"),
    "plan": Command("pipelinerl.plan", "recommend the split of devices, concurrency and lag"),
    "gpu-check": Command("pipelinerl.launcher.gpu_check", "verdicts on this machine's GPU, to paste into an issue"),
    "migrate": Command("pipelinerl.config.migrate", "an experiment of ServiceNow's PipelineRL as one of this project"),
    "schema": Command("pipelinerl.config.schema", "JSON schema of an experiment's YAML file, for editors"),
    "completion": Command(
        "pipelinerl.config.completion", 'completion of bash and zsh: eval "$(pipelinerl completion)"'
    ),
    "model": Command("pipelinerl.tiny_model", "build a tiny model from a recipe"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: `sys.argv`) and returns the exit code."""
    in_utf8()
    arguments = list(sys.argv[1:] if argv is None else argv)
    return told_in_one_line(lambda: run(arguments))


def run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else EXIT_REFUSED
    name = arguments[0]
    if name == "--version":
        versions = {"pipelinerl": version("pipelinerl"), **installed_versions()}
        print(*(f"{package} {number}" for package, number in versions.items()), sep=", ")
        return 0
    if name == "completion":
        from pipelinerl.config.completion import script

        print(script(COMMANDS), end="")
        return 0
    if name not in COMMANDS:
        print(f"error: `{name}` is not a command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return EXIT_REFUSED
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's domain lies there
    make_examples_importable()
    return run_module(COMMANDS[name].module, [f"pipelinerl {name}", *arguments[1:]])


def run_module(module: str, argv: list[str]) -> int:
    """Runs a module as the program `argv[0]` and returns its exit code."""
    sys.argv = argv
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        return ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    return 0


def help_text() -> str:
    width = max(map(len, [*COMMANDS, *config_names()]))
    commands = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    experiments = [f"  {name:<{width}}  {first_comment(name)}" for name in config_names()]
    return "\n".join(
        [
            "pipelinerl COMMAND …: reinforcement learning of language models while they generate",
            "",
            "Commands (each has --help; --version says what is installed, completion prints that of bash and zsh):",
            *commands,
            "",
            "Experiments, for --config-name:",
            *experiments,
        ]
    )


def first_comment(name: str) -> str:
    """Returns the comment in the first line of a configuration, which describes it."""
    path = next(path for folder in search_path() if (path := Path(folder) / f"{name}.yaml").is_file())
    with path.open(encoding="utf-8", errors="replace") as file:
        line = file.readline()
    return line.lstrip("# ").strip() if line.startswith("#") else ""


if __name__ == "__main__":
    sys.exit(main())
