"""``pipelinerl migrate OLD.yaml``: an experiment of ServiceNow's PipelineRL as one of this project.

Prints the new file. The comment at its top lists the changed keys, the keys left out, and those without an equivalent.
``pipelinerl migrate OLD_FOLDER --to NEW_FOLDER`` does the same with every experiment of a `conf` folder.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml

from pipelinerl.config.migrate.folder import migrate_file, migrate_folder
from pipelinerl.config.migrate.migration import Migration
from pipelinerl.errors import ConfigError

WIDTH = 118
"""Longest line of the new file."""


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text in block style, so that it keeps its line breaks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: `sys.argv`) and returns the exit code."""
    parser = argparse.ArgumentParser(prog="pipelinerl migrate", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("old", type=Path, help="an experiment's YAML file, or a `conf` folder")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="where the experiments of a folder are written")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    old: Path = arguments.old
    if not old.is_dir():
        print(written(migrate_file(old), old.name), end="")
        return 0
    if arguments.to is None:
        raise ConfigError(f"{old} is a folder: add `--to FOLDER` for its new experiments")
    write_folder(old, arguments.to)
    return 0


def write_folder(old: Path, to: Path) -> None:
    """Writes the experiments of a folder as files of another one. Says what became of each.

    Raises:
        ConfigError: there is nothing to migrate, or a file is there already.
    """
    new = migrate_folder(old)
    existing = [str(to / f"{name}.yaml") for name in new.experiments if (to / f"{name}.yaml").exists()]
    if existing:
        raise ConfigError(f"{existing[0]} is there already: choose another folder with `--to`")
    to.mkdir(parents=True, exist_ok=True)
    for name, experiment in new.experiments.items():
        (to / f"{name}.yaml").write_text(written(experiment, f"{name}.yaml"), encoding="utf-8")
        print(f"{to / name}.yaml: {len(experiment.changed)} changed, {len(experiment.missing)} without an equivalent")
    for name, reason in new.left_out.items():
        print(f"{name} is left out: {reason}")
    for line in new.missing:
        print(f"no equivalent of base.yaml's {line}")


def written(new: Migration, name: str) -> str:
    """Returns the text of the new file. ``name`` is the old file's name."""
    document = yaml.dump(new.document(), Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    return "\n".join([*head(new, name), "", document])


def head(new: Migration, name: str) -> list[str]:
    lines = [f"# From PipelineRL's {name}. Comments and the order of keys are new."]
    for title, entries in (
        ("Changed:", new.changed),
        ("Left out, because it is not needed:", new.needless),
        ("No equivalent, look at each:", new.missing),
    ):
        if entries:
            lines += ["#", f"# {title}"]
            for entry in entries:
                lines += textwrap.wrap(entry, WIDTH, initial_indent="# - ", subsequent_indent="#   ")
    return lines


if __name__ == "__main__":
    sys.exit(main())
