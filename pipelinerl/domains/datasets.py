"""Reads rows of Hugging Face data sets and local files one by one, and generates problems from a seed.

A dataset on the Hugging Face hub is named by ``<name>[:<config>][@<split>]``, as ``openai/gsm8k:main@train``. Others
are files, patterns of files and folders: ``data/train.jsonl``, ``data/*.parquet``, ``problems.csv.gz``, ``data/``. An
address of a JSON file (``https://…/rows.json``) works as well.
"""

import csv
import glob
import gzip
import json
import logging
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, TextIO

from pipelinerl.config.origin import DATA_ENDING, data_file
from pipelinerl.domains.json_text import parse
from pipelinerl.domains.rows import MAX_LEFT_OUT, load_usable
from pipelinerl.errors import DatasetError, DomainError
from pipelinerl.world.disk import matching

log = logging.getLogger(__name__)

csv.field_size_limit(1 << 30)  # tests of programs are longer than its default of 128 KiB

HELD_OUT_EVERY = 10
"""One generated problem in this many is held out for ``test``."""
NAME = re.compile(r"(?P<path>[^:@]+)(?::(?P<config>[^@]+))?(?:@(?P<split>.+))?")
FORM = re.compile(rf"(?=\.(?P<form>[a-z]+)){DATA_ENDING}$", re.IGNORECASE)
DATA_ENDINGS = ".jsonl, .ndjson, .json, .csv or .tsv (or one of them and .gz), .parquet or .arrow"
HUB_NOTES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that the library `datasets` writes beside the data."""
SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
TOO_MANY = "cells behind the last column"

Problem = dict[str, Any]


def is_held_out(content: str) -> bool:
    """Whether a generated problem belongs to ``test``, as one in ten does. The content decides, so the parts differ."""
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
        draw: (random numbers, whether to draw a held-out problem) → a problem, or None if all were drawn.
        num_train_problems: size of ``train``.
        num_test_problems: size of ``test``.
        seed: of ``train``. ``test`` is the same for every seed.
        read: (row, index) → a problem. Raises `UnusableRow`. None: the domain only has generated problems.
        max_left_out: as in `rows.load_usable`.
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
        DatasetError: it does not exist, cannot be reached or read, or a row has no columns.
    """
    try:
        for index, row in enumerate(raw_rows(name, streaming)):
            if not isinstance(row, dict):
                raise DomainError(f"dataset {name!r}: row {index} is {type(row).__name__}, not an object with columns")
            yield row
    except DomainError as error:
        raise DatasetError(str(error), name) from error
    except (OSError, EOFError, ValueError, csv.Error, zlib.error, RecursionError) as error:
        fixes = {UnicodeDecodeError: "; save it as UTF-8", csv.Error: "; close its quotes"}
        advice = fixes.get(type(error), "")
        raise DatasetError(f"dataset {name!r} cannot be read: {type(error).__name__}: {error}{advice}", name) from error


def raw_rows(name: str, streaming: bool) -> Iterator[Any]:
    if name.startswith("https://"):
        return hub_rows("json", None, "train", streaming, data_files=name)
    if "://" in name:
        raise DomainError(f"dataset {name!r}: only addresses that begin with https:// are read; download it")
    if (local := data_file(name)) is not None:
        return local_rows(name, *local)
    match = NAME.fullmatch(name)
    path = name if match is None else match["path"]
    if os.path.exists(path) or glob.has_magic(path):
        raise DomainError(
            f"dataset {name!r} is a file, a folder or a pattern here: write it as `./{name}`, or rename what is here"
        )
    if match is None:
        raise DomainError(f"dataset {name!r} is not of the form <name>[:<config>][@<split>], nor a file or a pattern")
    return hub_rows(match["path"], match["config"], match["split"] or "train", streaming)


def local_rows(name: str, path: str, part: str) -> Iterator[Any]:
    """Yields the rows of a file, of a folder, or of the files that a pattern matches.

    Args:
        name: the data set, for messages.
        path: a file, a folder or a pattern.
        part: the text behind the path, such as ``@train``.
    Raises:
        DomainError: there is no such file or part, or a folder has files of several forms.
    """
    if os.path.isdir(path):
        return (row for file in folder_files(name, Path(path), part.removeprefix("@")) for row in file_rows(file))
    found = [path] if os.path.isfile(path) else matching(path)
    files = [Path(file) for file in found if os.path.isfile(file)]
    if not files:
        raise DomainError(f"dataset {name!r}: no such file or folder")
    has_splits = part.startswith("@") and all(form_of(file) == "json" for file in files)
    if part not in ("", "@train") and not has_splits:
        raise DomainError(
            f"dataset {name!r} is a local file, which has one part, `train`: remove {part!r}, or name another file"
        )
    return (row for file in files for row in file_rows(file, part.removeprefix("@") or "train"))


def folder_files(name: str, folder: Path, split: str) -> list[Path]:
    """Returns the data files of one split in a folder and its subfolders, and logs the files that are left out.

    A split is found in the names of the files (``data/test-0.parquet``). Files whose names begin with a dot or an
    underscore, and the Hub's notes about a data set, are ignored.

    Args:
        name: the data set, for messages.
        folder: with files of one form.
        split: empty: ``train``, or the only split.
    Raises:
        DomainError: there is no data file, or none of this split, or there are files of several forms.
    """
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if path.name not in HUB_NOTES and not any(x[0] in "._" for x in path.parts)]
    data = [path for path in paths if form_of(path)]
    forms = sorted({form_of(path) for path in data})
    if len(forms) != 1:
        held = f"files of several forms ({', '.join(forms)})" if forms else f"no file that ends in {DATA_ENDINGS}"
        raise DomainError(f"dataset {name!r}: the folder holds {held}: name its files, as in `{folder}/*.jsonl`")
    splits = {path: split_of(path) for path in data}
    found = sorted(set(splits.values()))
    wanted = SPLITS.get(split, split) or (found[0] if len(found) == 1 else "train")
    chosen = [path for path in data if splits[path] == wanted]
    if not chosen:
        raise DomainError(f"dataset {name!r}: the folder has no part `{wanted}`, only {found}: name one with `@`")
    if left_out := [str(path) for path in paths if path not in chosen]:
        log.warning("event=files_left_out dataset=%s read=%d left_out=%s", name, len(chosen), left_out)
    return [folder / path for path in chosen]


def split_of(path: Path) -> str:
    """Returns the split that a file's path names, as on the Hub. A path without a split belongs to ``train``."""
    words = re.split(r"[^A-Za-z]+", str(path).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def form_of(path: Path) -> str:
    """Returns the form of a data file by its ending, such as ``jsonl``. Empty: it is not a data file."""
    match = FORM.search(path.name)
    form = "" if match is None else match["form"].lower()
    return "jsonl" if form == "ndjson" else form


def file_rows(file: Path, split: str = "train") -> Iterator[Any]:
    """Yields the rows of a local file one at a time. ``split``: which part of a ``.json`` file that holds several.

    A ``.json`` file with one list or object is read whole.
    """
    form = form_of(file)
    if form in ("parquet", "arrow"):
        for batch in table_batches(file, form):
            yield from map(without_nulls_within, batch.to_pylist())
        return
    if not form:
        raise DomainError(f"{file} is not a data file: its name must end in {DATA_ENDINGS}")
    with (gzip.open if file.suffix.lower() == ".gz" else open)(file, "rt", encoding="utf-8-sig", newline="") as stream:
        if form in ("csv", "tsv"):
            delimiter = "\t" if form == "tsv" else ","
            reader = csv.DictReader(stream, restkey=TOO_MANY, delimiter=delimiter, strict=True)
            refuse_repeated(reader.fieldnames or (), file)
            yield from map(without_extra_cells, reader)
        elif form == "json" and (split != "train" or not has_json_lines(stream)):
            yield from listed_rows(parse(stream.read()), file, split)
        else:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield json_row(line, file, number)


def table_batches(file: Path, form: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    if form == "parquet":
        with ParquetFile(file) as parquet:
            refuse_repeated(parquet.schema_arrow.names, file)
            yield from parquet.iter_batches(batch_size=1024)
    else:
        with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from batches


def refuse_repeated(columns: Sequence[str], file: Path) -> None:
    """Raises ``DomainError`` if columns have the same name: a row could hold only one of their values."""
    if repeated := sorted(name for name, count in Counter(columns).items() if count > 1):
        raise DomainError(f"{file} has several columns of the name {repeated[0]!r}: rename them, or remove all but one")


def without_nulls_within(row: dict[str, Any]) -> dict[str, Any]:
    """Removes null keys inside objects: a table adds them where another row's object has the key. Columns stay.

    A null that the row's author wrote looks the same in a table, so it is removed as well.
    """

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(item) for name, item in value.items() if item is not None}
        return [without(item) for item in value] if isinstance(value, list) else value

    return {name: without(value) for name, value in row.items()}


def without_extra_cells(row: dict[str, Any]) -> dict[str, Any]:
    """Removes all columns of a row that has more cells than columns, since the cells cannot be assigned to columns."""
    extra = row.pop(TOO_MANY, ())
    return {TOO_MANY: extra} if any(extra) else row


def has_json_lines(stream: TextIO) -> bool:
    """Whether a file begins with a line that is an object, and goes on. Leaves the stream at its start."""
    lines = (line for line in stream if line.strip())
    try:
        return isinstance(parse(next(lines, "")), dict) and next(lines, None) is not None
    except ValueError:
        return False
    finally:
        stream.seek(0)


def listed_rows(content: Any, file: Path, split: str) -> list[Any]:
    """Returns the rows of a JSON value: a list, an object with a list of rows, one list for each split, or one row."""
    lists = {}
    if isinstance(content, dict):
        lists = {key: rows for key, rows in content.items() if isinstance(rows, list)}
        if lists and all(key in SPLITS for key in content):
            content = {SPLITS[key]: rows for key, rows in lists.items()}
            if (split := SPLITS.get(split, split)) not in content:
                raise DomainError(f"{file} has the parts {sorted(content)}, not {split!r}: name one with `@`")
            return content[split]
    if split != "train":
        raise DomainError(f"{file} has one part, `train`: remove '@{split}'")
    if isinstance(content, list):
        return content
    rows = lists.get("data") or lists.get("rows") or [None]
    return rows if all(isinstance(row, dict) for row in rows) else [content]


def json_row(line: str, file: Path, number: int) -> Any:
    try:
        return parse(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DomainError(f"{file}:{number} is not JSON that can be read: {error}") from error


def hub_rows(path: str, config: str | None, split: str, streaming: bool, **options: str) -> Iterator[dict[str, Any]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DomainError(f"dataset {path!r} needs the extra `data`: pip install pipelinerl[data]") from error
    return map(without_nulls_within, load_dataset(path, config, split=split, streaming=streaming, **options))
