"""``pipelinerl migrate OLD.yaml``: an experiment of ServiceNow's PipelineRL as one of this project.

Prints the new file. The comment at its top lists the changed keys, the keys left out, and those without an equivalent.
"""

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.migrate.migration import Migration, migrate

WIDTH = 118


class _Dumper(yaml.SafeDumper):
    """Writes multi-line text in block style, so that it keeps its line breaks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line (None: `sys.argv`) and returns the exit code."""
    parser = argparse.ArgumentParser(prog="pipelinerl migrate", description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", type=Path, help="an experiment's YAML file")
    path = parser.parse_args(sys.argv[1:] if argv is None else argv).file
    try:
        old = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, UnicodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        print(f"error: {path} cannot be read: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_REFUSED
    if not isinstance(old, dict):
        print(f"error: {path} is not an experiment: it must hold a mapping of keys", file=sys.stderr)
        return EXIT_REFUSED
    print(written({str(key): value for key, value in old.items()}, path.name), end="")
    return 0


def written(old: dict[str, object], name: str) -> str:
    """Returns the text of the new file. ``name`` is the old file's name."""
    new = migrate(old)
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
