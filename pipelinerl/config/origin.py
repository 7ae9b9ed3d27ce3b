"""A run belongs to no working directory: its local paths are absolute, and its folder says where it was made.

`absolute` is applied once, when a run is made. `with_moved_paths` follows a run folder that was moved, whenever its
configuration is read. `conf/origin.json` holds the path under which the run was made, which stays the run's name on
servers that it shares with others, and the folders from which its own modules are imported.
"""

import glob
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.config.nested import map_texts, value_at, with_settings
from pipelinerl.config.paths import EXAMPLES_DIR, RUN_CONFIG, RUN_ORIGIN

DATA_ENDING = r"\.(?:(?:jsonl|ndjson|json|csv|tsv)(?:\.gz)?|parquet|arrow)"
DATA_FILE = re.compile(rf"(?P<path>.+{DATA_ENDING})(?P<part>(?::[^:@/]*)?(?:@[^@/]*)?)", re.IGNORECASE)
"""Name of a data set in a local file, or in several by a pattern."""
DATA_FOLDER = re.compile(r"(?P<path>.*/.*?)(?P<part>(?:@[^@/]*)?)")
"""Name of a data set that may be a local folder. Without a slash it is the name of one elsewhere: `train`."""
FREE_FORM = ("dataset_loader_params", "domain", "environment", "environments", "vllm_config")
"""Sections of the user's own, where any text may be a path. It is one if it looks like one and is there."""


def absolute(container: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Returns a resolved configuration whose local paths are absolute.

    What is not on this machine stays as it is where it may be a name: `Qwen/Qwen2.5-7B`, `openai/gsm8k:main@train`.

    Args:
        container: plain nested dictionaries.
        base: the folder that relative paths start from.
    """
    found = _with_absolute_data(container, base)
    if found.get("domains"):
        found["domains"] = [_with_absolute_data(domain, base) for domain in found["domains"]]
    model = found.get("model_path")
    if isinstance(model, str):
        found["model_path"] = _absolute(model, base) if found.get("tiny_model") else _absolute_model(model, base)
    for key in ("sft.datasets", "sft.test_datasets"):
        if names := value_at(found, key):
            found = with_settings(found, {key: [_absolute_data(name, base) for name in names]})
    if isinstance(found.get("reference_model_path"), str):
        found["reference_model_path"] = _absolute_model(found["reference_model_path"], base)
    if found.get("teachers"):
        found["teachers"] = [_with_absolute_model(teacher, base) for teacher in found["teachers"]]
    if found.get("judges"):
        found["judges"] = [
            judge if judge.get("url") else _with_absolute_model(judge, base) for judge in found["judges"]
        ]
    for key in ("deepspeed_config", "llm.chat_template", "test_llm.chat_template"):
        value = value_at(found, key)
        if isinstance(value, str) and os.path.isfile(base / value):  # else it is a name
            found = with_settings(found, {key: _absolute(value, base)})
    for key in ("debug.streams_from", "weights.store"):
        value = value_at(found, key)
        if isinstance(value, str) and "://" not in value:
            found = with_settings(found, {key: _absolute(value, base)})
    return found


def _with_absolute_data(section: Mapping[str, Any], base: Path) -> dict[str, Any]:
    found = dict(section)
    for key in ("train_dataset_names", "test_dataset_names"):
        if isinstance(found.get(key), list):
            found[key] = [_absolute_data(name, base) if isinstance(name, str) else name for name in found[key]]
    for key in FREE_FORM:
        if key in found:
            found[key] = map_texts(found[key], lambda text: _absolute_if_there(text, base))
    return found


def _absolute_data(name: str, base: Path) -> str:
    """`data/rows.jsonl` → `/home/me/data/rows.jsonl`. Names of data sets elsewhere stay."""
    found = data_file(name, base)
    return name if found is None else _absolute(found[0], base) + found[1]


def data_file(name: str, base: Path = Path()) -> tuple[str, str] | None:
    """Returns path and `:config@split` of a data set in local files. None: the name is that of one elsewhere.

    A path with a colon or an `@`, and one without the ending of a data file, must begin as a path (`/`, `./`, `../`,
    `~`), or be there.
    """
    if "://" in name:
        return None
    file = DATA_FILE.fullmatch(name)
    if file is not None and not re.search("[:@]", file["path"]):
        return file["path"], file["part"]
    for match in filter(None, (file, DATA_FOLDER.fullmatch(name))):
        path = match["path"]
        if _looks_local(path) or glob.has_magic(path) or os.path.exists(base / path):
            return path, match["part"]
    return None


def _with_absolute_model(section: Mapping[str, Any], base: Path) -> dict[str, Any]:
    path = section.get("model_path")
    return {**section, "model_path": _absolute_model(path, base)} if isinstance(path, str) else dict(section)


def _absolute_model(path: str, base: Path) -> str:
    return _absolute(path, base) if _looks_local(path) or (base / path).exists() else path


def _looks_local(text: str) -> bool:
    return text.startswith(("/", "./", "../", "~"))


def _absolute_if_there(text: str, base: Path) -> str:
    like_a_path = "\n" not in text and len(text) < 4096 and (_looks_local(text) or "/" in text or "." in text)
    try:
        return _absolute(text, base) if like_a_path and (base / text).exists() else text
    except (OSError, ValueError):
        return text


def _absolute(path: str, base: Path) -> str:
    """Without `..`, links as they are: a link that is turned later is followed later. An unknown `~name` stays."""
    return os.path.normpath(base / os.path.expanduser(path))


def with_moved_paths(container: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    """Returns the configuration of a run folder with the paths that it has now: those within it follow it."""
    old, new = str(container.get("output_dir", "")), str(run_dir.resolve())
    if not old.startswith("/") or old == new:
        return dict(container)

    def follow(text: str) -> str:
        return new + text[len(old) :] if text == old or text.startswith(f"{old}/") else text

    return map_texts(dict(container), follow)


def placeless(container: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """Returns what two nodes have in common that start one run from folders of their own."""
    settings = {key: value for key, value in container.items() if key != "output_dir"}
    places = [(str(container.get("output_dir", base)), "RUN"), (str(base), ".")]

    def without_place(text: str) -> str:
        found = next(((old, new) for old, new in places if text == old or text.startswith(f"{old}/")), ("", ""))
        return found[1] + text[len(found[0]) :]

    return map_texts(settings, without_place)


def origin_document(run_dir: Path) -> str:
    """What `conf/origin.json` holds after this launch. The name of a run that was made before stays."""
    folders = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *_read(run_dir).get("import_path", [])]
    imported = list(dict.fromkeys(os.path.abspath(folder) for folder in folders if folder))
    return json.dumps({"run_dir": str(named_folder(run_dir)), "import_path": imported}, indent=2) + "\n"


def named_folder(run_dir: str | Path) -> Path:
    """The path under which the run was made: its name, also after the folder was moved."""
    return Path(_read(Path(run_dir)).get("run_dir") or Path(run_dir).resolve())


def make_importable(run_dir: Path) -> None:
    """Lets this process, and those that it starts, import the run's own modules (domain, losses, streams).

    Where the run was launched they were found first. Here they are found after everything else.
    """
    import_from([folder for folder in _read(run_dir).get("import_path", []) if Path(folder).is_dir()])


def make_examples_importable() -> None:
    """Lets this process, and those that it starts, import `examples.NAME` from any working directory."""
    if EXAMPLES_DIR.is_dir():
        import_from([str(EXAMPLES_DIR.parent)])


def import_from(folders: Sequence[str]) -> None:
    """Puts folders behind `sys.path`, here and in the processes that this one starts."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    if folders:
        inherited = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*inherited, *folders]))


def copy_of(run_dir: Path) -> Path | None:
    """The folder in which the run was made, if it still holds that run and is another one than this."""
    original = named_folder(run_dir)
    is_there = original.resolve() != run_dir.resolve() and (original / RUN_CONFIG).is_file()
    return original if is_there and named_folder(original) == original else None


def _read(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / RUN_ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
