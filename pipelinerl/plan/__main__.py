"""``python -m pipelinerl.plan``: recommend a split before a run, compare with it afterwards.

python -m pipelinerl.plan --config-name base --gpu H100 --mean-length 2500
    python -m pipelinerl.plan --gpus 16 --model Qwen/Qwen2.5-7B --decode 8:900 --decode 128:7000 --train 9000
python -m pipelinerl.plan compare results/base
python -m pipelinerl.plan weights --gbytes-per-s 50
    python -m pipelinerl.plan memory --gpu-gib 141
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pipelinerl.errors import PipelineRLError
from pipelinerl.plan import published_models as memory_table
from pipelinerl.plan import split, update_time
from pipelinerl.plan.compare import run_compare


def main(argv: Sequence[str] | None = None) -> int:
    args = make_parser().parse_args(with_command(sys.argv[1:] if argv is None else argv))
    console = Console()
    try:
        result = args.run(args, console)
    except (PipelineRLError, HydraException, OmegaConfBaseException, ValueError) as error:
        print(f"pipelinerl.plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def with_command(argv: Sequence[str]) -> list[str]:
    """`split` is what is meant when no command is named."""
    named = bool(argv) and (argv[0] in ("-h", "--help") or not argv[0].startswith("-"))
    return list(argv) if named else ["split", *argv]


def run_split(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    _, _, result = split.recommend_split(args, console)
    return result


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipelinerl plan", description=(__doc__ or "").partition("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="{split,compare,weights,memory}")
    plan = commands.add_parser("split", help="recommend split, concurrency, lag and speed-up")
    plan.set_defaults(run=run_split)
    split.add_arguments(plan)
    compare = commands.add_parser("compare", help="prediction and measurement of a run")
    compare.set_defaults(run=run_compare)
    compare.add_argument("run_dir", type=Path)
    weights = commands.add_parser("weights", help="predicted time of a weight update (docs/algorithms.md §11)")
    weights.set_defaults(run=update_time.run_weights)
    update_time.add_arguments(weights)
    memory = commands.add_parser("memory", help="memory of published models in trainers and servers")
    memory.set_defaults(run=memory_table.run_memory)
    memory_table.add_arguments(memory)
    for command in (plan, compare, weights, memory):
        command.add_argument("--json", metavar="FILE", help="write the result there, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
