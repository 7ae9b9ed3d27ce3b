"""Loads problems: reads Hugging Face data sets and local files row by row, or generates problems from a seed.

A dataset on the Hugging Face hub is named by ``<name>[:<config>][@<split>]``, as ``openai/gsm8k:main@train``. Others
are files and patterns of files: ``data/train.jsonl``, ``data/*.parquet``, ``problems.csv``. An address of a JSON file
(``https://…/rows.json``) works as well.
"""

import csv
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from pipelinerl.config.origin import data_file
from pipelinerl.domains.rows import MAX_LEFT_OUT, load_usable
from pipelinerl.errors import DomainError
from pipelinerl.world.disk import matching

HELD_OUT_EVERY = 10
NAME = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")

Problem = dict[str, Any]


def is_held_out(content: str) -> bool:
    """Whether a generated problem belongs to ``test``. Its content decides, so no problem is in both parts.

    About one problem in ten is held out.
    """
    return zlib.crc32(content.encode()) % HELD_OUT_EVERY == 0


def generate_problems(
    domain: str,
    dataset_names: list[str],
    draw: Callable[[Random, bool], Problem | None],
    *,
    num_train_problems: int,
    num_test_problems: int,
    seed: int,
    read: Callable[[dict[str, Any], int], Problem] | None = None,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[Problem]:
    """Generates the problems of ``train`` and ``test``, and reads data sets of other names.

    Args:
        domain: name of the domain, for error messages.
        dataset_names: ``train``, ``test``, or names of data sets to read.
        draw: (random numbers, whether to draw a held-out problem) → a problem, or None if there are no more.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
        read: (row, index) → a problem. Raises `UnusableRow`. None: the domain only has generated problems.
        max_left_out: of the rows that are read (``pipelinerl.domains.rows``).
    """
    problems: list[Problem] = []
    for name in dataset_names:
        if name not in ("train", "test"):
            if read is None:
                raise DomainError(f"domain `{domain}` has no dataset {name!r}: use `train` or `test`")
            found = load_usable(name, rows_of(name, True), read, max_left_out=max_left_out)
            problems += [{"dataset": name} | problem for problem in found]
            continue
        held_out = name == "test"
        rng = Random("test" if held_out else f"train {seed}")
        for _ in range(num_test_problems if held_out else num_train_problems):
            problem = draw(rng, held_out)
            if problem is None:
                break
            problems.append({"dataset": name} | problem)
    return problems


def rows_of(name: str, streaming: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of a data set one at a time.

    Args:
        name: see the module's docstring.
        streaming: read a Hugging Face data set as a stream instead of downloading it.
    Raises:
        DomainError: the data set does not exist, cannot be reached or read, or a row has no columns.
    """
    try:
        for index, row in enumerate(raw_rows(name, streaming)):
            if not isinstance(row, dict):
                raise DomainError(f"dataset {name!r}: row {index} is {type(row).__name__}, not an object with columns")
            yield row
    except DomainError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise DomainError(f"dataset {name!r} cannot be read: {type(error).__name__}: {error}") from error


def raw_rows(name: str, streaming: bool) -> Iterator[Any]:
    if name.startswith("https://"):
        return hub_rows("json", None, "train", streaming, data_files=name)
    if "://" in name:
        raise DomainError(f"dataset {name!r}: only addresses that begin with https:// are read; download it")
    if (local := data_file(name)) is not None:
        return local_rows(name, *local)
    match = NAME.fullmatch(name)
    if match is None:
        raise DomainError(f"dataset {name!r} is not of the form <name>[:<config>][@<split>], nor a file or a pattern")
    return hub_rows(match["path"], match["config"], match["split"] or "train", streaming)


def local_rows(name: str, path: str, part: str) -> Iterator[Any]:
    """Yields the rows of a file, or of those that a pattern matches. ``part``: what stands behind the path."""
    if part not in ("", "@train"):
        raise DomainError(
            f"dataset {name!r} is a local file, which has one part, `train`: remove {part!r}, or name another file"
        )
    files = [path] if Path(path).is_file() else matching(path)
    if not files:
        raise DomainError(f"dataset {name!r}: no such file")
    return (row for file in files for row in file_rows(Path(file)))


def file_rows(file: Path) -> Iterator[Any]:
    """Yields the rows of a local file one at a time. A ``.json`` file holds one list and is read whole."""
    if file.suffix == ".parquet":
        from pyarrow.parquet import ParquetFile

        with ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
        return
    with file.open(encoding="utf-8-sig", newline="") as stream:
        if file.suffix == ".csv":
            yield from csv.DictReader(stream, restkey="")
        elif file.suffix == ".json":
            yield from json.load(stream)
        else:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield json_row(line, file, number)


def json_row(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DomainError(f"{file}:{number} is not JSON: {error}") from error


def hub_rows(path: str, config: str | None, split: str, streaming: bool, **options: str) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DomainError(f"dataset {path!r} needs the extra `data`: pip install pipelinerl[data]") from error
    return iter(load_dataset(path, config, split=split, streaming=streaming, **options))
