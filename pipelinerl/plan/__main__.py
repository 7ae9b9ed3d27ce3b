"""``python -m pipelinerl.plan``: recommend a split of devices, the concurrency and the lag before a run.

python -m pipelinerl.plan --config-name base --gpu H100 --mean-length 2500
    python -m pipelinerl.plan --gpus 16 --model Qwen/Qwen2.5-7B --decode 8:900 --decode 128:7000 --train 9000
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from pipelinerl.errors import PipelineRLError
from pipelinerl.plan import split


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="pipelinerl plan", description=(__doc__ or "").partition("\n\n")[0])
    split.add_arguments(parser)
    parser.add_argument("--json", metavar="FILE", help="write the result there, too")
    args = parser.parse_args(given[1:] if given[:1] == ["split"] else given)  # `plan split` is what it was called
    try:
        _, _, result = split.recommend_split(args, Console())
    except (PipelineRLError, HydraException, OmegaConfBaseException, ValueError) as error:
        print(f"pipelinerl.plan: {error}", file=sys.stderr)
        return 2
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
