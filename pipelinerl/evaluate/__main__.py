"""`pipelinerl evaluate MODEL --config-name=NAME`: a model on the test problems of an experiment.

    pipelinerl evaluate results/math/exports/step_200 --config-name=math --attempts 8 --out pass.json
    pipelinerl evaluate Qwen/Qwen2.5-7B --config-name=math --k 1,4 eval.max_problems=100
    pipelinerl evaluate results/x/exports/step_40 --config-name=math 'debug.existing_llms=[http://127.0.0.1:8080]'

Servers, verifiers and rollouts are those of a run (`debug.mode=evaluation`), on all devices. Nothing is resumed and
nothing stays: the run folder is a temporary one, unless --keep names it. Prints pass@k per data set with intervals of
95 %. The launcher's lines go to stderr. Exits with 1 if attempts have no result.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelinerl.errors import ConfigError, told_in_one_line
from pipelinerl.evaluate.passk import Estimate, Tally, estimate, powers_up_to
from pipelinerl.inspect.alone import read_alone
from pipelinerl.inspect.arguments import command_parser
from pipelinerl.launch import main as launch

ALL = "all"
"""Name of the row over every data set."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: `sys.argv`) and return the exit code."""
    args = parser().parse_intermixed_args(argv)
    ks = chosen_ks(args.k, args.attempts)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="pipelinerl-evaluate-"))
    with contextlib.redirect_stdout(sys.stderr):
        code = launch(arguments_of(args, folder))
    found = (read_alone(folder) or {}).get("evaluation")
    if code or found is None:
        if not args.keep and not list(folder.glob("*_0/log.txt")):
            shutil.rmtree(folder)  # refused: nothing was started
        elif code < 128:
            print(f"error: no evaluation; the logs are in {folder}", file=sys.stderr)
        return code or 1
    result = {"model": args.model, "config": args.config_name, **evaluated(found, args.attempts, ks)}
    print("\n".join(table_lines(result, ks)))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")
    if not args.keep:
        shutil.rmtree(folder)
    return 0 if result["complete"] == 1 else 1


def parser() -> argparse.ArgumentParser:
    own = command_parser("evaluate", __doc__)
    own.add_argument("model", help="a model folder, such as an export of a run, or a Hugging Face name")
    own.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for `pipelinerl launch`")
    own.add_argument("--config-name", "-cn", required=True, help="the experiment: its domains, test problems, servers")
    own.add_argument("--config-dir", "-cd", help="folder of experiments that is searched first")
    own.add_argument("--attempts", type=int, default=1, metavar="N", help="attempts at every problem (1)")
    own.add_argument("--k", metavar="K,K", help="values of k, at most N (1, 2, 4, … N)")
    own.add_argument("--out", type=Path, metavar="FILE", help="write the figures as JSON")
    own.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for rollouts and logs, which stays")
    return own


def chosen_ks(text: str | None, attempts: int) -> list[int]:
    """Read the values of k. Raises ``ConfigError`` if `attempts` cannot give one."""
    if attempts < 1:
        raise ConfigError(f"--attempts is {attempts}: it must be at least 1")
    try:
        ks = sorted({int(part) for part in text.split(",")}) if text else powers_up_to(attempts)
    except ValueError as error:
        raise ConfigError(f"--k is {text!r}: write numbers with commas, such as 1,4,8") from error
    if ks[0] < 1 or ks[-1] > attempts:
        raise ConfigError(f"--k is {text}: each must be at least 1 and at most --attempts={attempts}")
    return ks


def arguments_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the launcher's command line. The user's settings come last."""
    config_dir = [f"--config-dir={args.config_dir}"] if args.config_dir else []
    own = {
        "output_dir": str(folder),
        "model_path": args.model,
        "debug.mode": "evaluation",
        "eval.attempts": args.attempts,
        "wandb.mode": "disabled",
    }
    settings = [f"{key}={json.dumps(value)}" for key, value in own.items()]
    return [*config_dir, f"--config-name={args.config_name}", *settings, *args.overrides]


def evaluated(found: Mapping[str, Any], attempts: int, ks: Sequence[int]) -> dict[str, Any]:
    """Compute the figures.

    Args:
        found: the evaluation's figures (`inspect.alone`).
        attempts: that were asked for.
        ks: values of k, ascending.
    """
    by_set = {name: [Tally(*pair) for pair in pairs] for name, pairs in sorted(found["outcomes"].items())}
    rows = {**by_set, **({ALL: [one for tallies in by_set.values() for one in tallies]} if len(by_set) != 1 else {})}
    return {
        "attempts": attempts,
        "complete": found["metrics"]["complete"],
        "rollouts": found["rollouts"],
        "reward": found["reward"],
        "datasets": {name: set_figures(tallies, ks) for name, tallies in rows.items()},
    }


def set_figures(tallies: Sequence[Tally], ks: Sequence[int]) -> dict[str, Any]:
    """pass@k of one data set. A k without a problem of enough attempts is left out."""
    found = {f"pass@{k}": estimate(tallies, k) for k in ks}
    return {"problems": len(tallies), **{name: asdict(one) for name, one in found.items() if one is not None}}


def table_lines(result: Mapping[str, Any], ks: Sequence[int]) -> list[str]:
    """Return the figures as a table."""
    width = max(len(name) for name in ("data set", *result["datasets"]))
    head = f"{'data set':<{width}}  problems" + "".join(f"  {f'pass@{k} (95 %)':>22}" for k in ks)
    rows = [
        f"{name:<{width}}  {row['problems']:>8}" + "".join(f"  {cell(row.get(f'pass@{k}')):>22}" for k in ks)
        for name, row in result["datasets"].items()
    ]
    lost = [] if result["complete"] == 1 else [f"only {result['complete']:.1%} of the attempts have a result"]
    return [head, *rows, *lost]


def cell(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "–"
    one = Estimate(**found)  # type: ignore[arg-type]
    return f"{one.value:.3f} ({one.low:.3f}–{one.high:.3f})"


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(told_in_one_line(main))
