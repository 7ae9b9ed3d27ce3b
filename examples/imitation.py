"""The command line of a recipe that imitates first: it prints its conversations, one JSON object per line."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def print_conversations(description: str | None, make: Callable[[int, int], Iterable[Mapping[str, Any]]]) -> None:
    """Print ``make(rows, seed)`` of the command line. ``description``: its help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for row in make(args.rows, args.seed):
        print(json.dumps(row))
