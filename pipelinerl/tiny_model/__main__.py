"""`pipelinerl model --out PATH --recipe largest --seed 0 [--param max_number=30 …]`: build a tiny model.

`pipelinerl model gguf FILE FOLDER`: the model in a GGUF file as a folder that transformers and vLLM load.

A model that was built before from the same recipe, seed, parameters, code and versions is copied from the cache of the
user: PIPELINERL_CACHE, by default pipelinerl in XDG_CACHE_HOME or ~/.cache.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from pipelinerl.errors import told_in_one_line
from pipelinerl.tiny_model import RECIPES, build
from pipelinerl.tiny_model.gguf_file import DTYPES, convert_gguf
from pipelinerl.world.home import writable_folders


def parse_param(text: str) -> tuple[str, object]:
    """Reads ``name=value``. The value is JSON, else a string."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"`{text}` is not of the form name=value")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def user_cache() -> Path:
    """Returns the folder of this user's files that can be made again."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"
    return Path(os.environ.get("PIPELINERL_CACHE") or default)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line (None: `sys.argv`) and returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    make = from_gguf if words[:1] == ["gguf"] else from_recipe
    print(make(words))
    return 0


def from_gguf(words: list[str]) -> Path:
    parser = argparse.ArgumentParser(
        prog="pipelinerl model gguf",
        description="The model in a GGUF file as a folder that transformers and vLLM load.",
    )
    parser.add_argument("file", help="a GGUF file")
    parser.add_argument("folder", help="folder to create; without --if-missing it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the written weights")
    parser.add_argument("--if-missing", action="store_true", help="keep a model that is already in the folder")
    arguments = parser.parse_args(words[1:])
    return convert_gguf(arguments.file, arguments.folder, arguments.dtype, if_missing=arguments.if_missing)


def from_recipe(words: list[str]) -> Path:
    parser = argparse.ArgumentParser(prog="pipelinerl model", description=__doc__)
    parser.add_argument("--out", required=True, help="folder to create; without --if-missing it must not exist")
    parser.add_argument("--recipe", required=True, help=f"one of {', '.join(sorted(RECIPES))}, or module.function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--param", action="append", default=[], type=parse_param, metavar="NAME=VALUE")
    parser.add_argument("--if-missing", action="store_true", help="keep a model that is already in the folder")
    arguments = parser.parse_args(words)
    return build(
        arguments.out,
        arguments.recipe,
        arguments.seed,
        dict(arguments.param),
        user_cache() / "models",
        if_missing=arguments.if_missing,
    )


if __name__ == "__main__":
    os.environ.update(writable_folders(os.environ))
    sys.exit(told_in_one_line(main))
