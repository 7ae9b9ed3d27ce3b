"""Generates the descriptions of keys from their declarations: `python -m pipelinerl.config.docs [--check]`.

It writes the parts between the two marks in `conf/base.yaml`, `conf/finetune/base.yaml`, `conf/streams/files.yaml`,
`docs/configuration.md` and `docs/migrating.md`. The rest of these files is written by hand. `--check` writes
nothing and exits with 1 where a file differs.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pipelinerl.config.environment import VARIABLES
from pipelinerl.config.keys import REQUIRED, Key, Section, declared, optional_subsection, sections, subsection
from pipelinerl.config.renames import GROUPS, NEEDLESS, OF_DOMAINS, Rename, explained
from pipelinerl.config.sections import Config, FinetuneSection, StreamsSection

ROOT = Path(__file__).resolve().parents[2]
BEGIN = "begin: written by `make format`"
END = "end"
FROM_GROUPS = ("finetune", "streams", "rewards")
"""Keys that base.yaml takes from files of their own."""
WIDTH, COMMENT_COLUMN = 120, 34
"""Layout of the YAML files."""


def pages() -> dict[str, str]:
    """The generated part of every file."""
    return {
        "conf/base.yaml": yaml_of(Config, skip=FROM_GROUPS),
        "conf/finetune/base.yaml": yaml_of(FinetuneSection),
        "conf/streams/files.yaml": yaml_of(StreamsSection),
        "docs/configuration.md": configuration_page(),
        "docs/migrating.md": renamed_keys(),
    }


def yaml_of(section: type[Section], skip: Iterable[str] = (), indent: int = 0) -> str:
    """Every key with its default and, as comment, its meaning."""
    keys = {key.name: key for key in declared(section)}
    lines: list[str] = []
    for name, field in section.model_fields.items():
        inner = subsection(field)
        if name in skip:
            continue
        if inner:
            lines += [f"{' ' * indent}{name}:", yaml_of(inner, indent=indent + 2)]
        else:
            lines.append(textwrap.indent(yaml_entry(keys[name], indent), " " * indent))
    return "\n".join(lines)


def yaml_entry(key: Key, indent: int) -> str:
    """`name: default   # comment`. A long comment is put above the line. A long mapping has one line per key."""
    width, column = WIDTH - indent, COMMENT_COLUMN - indent
    entry = f"{key.last}: {flow(key.default)}"
    if len(entry) > width:
        inner = "\n".join(f"  {name}: {flow(value)}" for name, value in key.default.items())
        return f"{key.last}:{'':<{column - len(key.last) - 1}}# {comment(key, width - column - 2)}\n{inner}"
    start = max(column, len(entry) + 1)
    text = comment(key, width - start - 2)
    if text:
        return f"{entry:<{start}}# {text}"
    return "\n".join([*textwrap.wrap(f"# {meaning_sentences(key.meaning)[0]}", width, subsequent_indent="# "), entry])


def comment(key: Key, width: int) -> str:
    """Returns the choices and as many sentences of the meaning as fit. Empty if not even the first one fits."""
    parts = meaning_sentences(key.meaning)
    texts = [". ".join(parts[:n]) for n in range(len(parts), 0, -1)]
    if key.choices:
        texts = [f"{' | '.join(key.choices)}: {text}" for text in texts] + texts
    return next((text for text in texts if len(text) <= width), "")


def meaning_sentences(meaning: str) -> list[str]:
    return re.split(r"(?<!e\.g)\. ", meaning)


def flow(value: Any) -> str:
    """A value as YAML on one line, interpolations unquoted where YAML allows it."""
    if isinstance(value, str) and value.startswith("${"):
        return value
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).removesuffix("...\n").strip()


def configuration_page() -> str:
    """Returns one table per section. Optional sections follow as separate tables."""
    parts = []
    for name, section in sections(Config):
        own = [key for key in declared(section, f"{name}.".lstrip(".")) if key.section is section]
        parts.append(section_table(f"`{name}`" if name else "Experiment", section, own))
        for field_name, field in section.model_fields.items():
            inner = optional_subsection(field)
            if inner:
                parts.append(section_table(f"`{field_name}`", inner, list(declared(inner, f"{field_name}."))))
    return "\n\n".join([*parts, variables_table()])


def variables_table() -> str:
    rows = [f"| `{name}` | {kind.allowed} | {meaning} |" for name, (kind, meaning) in VARIABLES.items()]
    intro = "What this project reads of its environment. Case does not matter, and any other value is refused."
    head = "| variable | type | meaning |\n|---|---|---|"
    return "\n".join(["## Environment variables", "", intro, "", head, *rows])


def section_table(title: str, section: type[Section], keys: Iterable[Key]) -> str:
    head = "| key | type | default | resumed run | meaning |\n|---|---|---|---|---|"
    rows = [
        f"| `{key.name}` | {key.type} | {default_cell(key.default)} | "
        f"{'may change' if key.may_change else 'fixed'} | {key.meaning.replace('|', chr(92) + '|')} |"
        for key in keys
    ]
    intro = " ".join((section.__doc__ or "").split())
    return "\n".join([f"## {title}", "", intro, "", head, *rows])


def renamed_keys() -> str:
    """PipelineRL's keys: one table per group, then the keys that only domains read, and those that are not needed."""
    tables = [
        "\n".join(["### " + title, "", "| there | here | |", "|---|---|---|", *map(renamed_row, rows)])
        for title, rows in GROUPS.items()
    ]
    own, needless = (", ".join(f"`{name}`" for name in sorted(names)) for names in (OF_DOMAINS, NEEDLESS))
    stay = f"### Keys of domains\n\nThey stay where they are, and `extra_keys` names them: {own}"
    return "\n\n".join([*tables, stay, f"### Not needed\n\n{needless}"])


def renamed_row(row: Rename) -> str:
    here = f"`{row.new}`" if row.kind == "moved" else "no equivalent"
    return f"| `{row.old}` | {here} | {explained(row)} |"


def default_cell(default: Any) -> str:
    return "required" if default == REQUIRED else f"`{flow(default)}`"


def replace_between_marks(text: str, part: str) -> str:
    """The file's text with the lines between its marks replaced."""
    lines = text.splitlines()
    begin = next(i for i, line in enumerate(lines) if BEGIN in line)
    end = next(i for i, line in enumerate(lines) if i > begin and line.strip("#<!-> ") == END)
    return "\n".join([*lines[: begin + 1], part, *lines[end:]]) + "\n"


def stale(pages: Mapping[str, str], root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Files whose part between the marks is another one, with what they should be."""
    for name, part in pages.items():
        path = root / name
        wanted = replace_between_marks(path.read_text(encoding="utf-8"), part)
        if wanted != path.read_text(encoding="utf-8"):
            yield path, wanted


def write_pages(description: str, pages: Callable[[], Mapping[str, str]]) -> int:
    """Runs the command line of a generator and returns the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file differs")
    check = parser.parse_args().check
    differing = list(stale(pages()))
    for path, wanted in differing:
        if not check:
            path.write_text(wanted, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {'differs: run make format' if check else 'written'}")
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(write_pages("Write the YAML files and the page that describe every key.", pages))
