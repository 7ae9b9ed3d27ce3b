"""`pipelinerl evaluate MODEL --config-name=NAME`: a model on the test problems of an experiment.

    pipelinerl evaluate results/math/exports/step_200 --attempts 8 --out pass.json
    pipelinerl evaluate Qwen/Qwen2.5-7B --config-name=math --k 1,4 eval.max_problems=100
    pipelinerl evaluate results/x/exports/step_40 --config-name=math 'debug.existing_llms=[http://127.0.0.1:8080]'

Starts servers, verifiers and rollouts as a run does (`debug.mode=evaluation`), on all devices. Nothing is resumed, and
the run folder is deleted at the end unless --keep names it. Prints pass@k per data set with intervals of 95 %. The
launcher's lines go to stderr. Exits with 1 if attempts have no result.
"""

import argparse
import contextlib
import json
import math
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelinerl.config.origin import make_importable
from pipelinerl.config.paths import RUN_CONFIG, newest_export
from pipelinerl.errors import ConfigError, visible
from pipelinerl.inspect.curves import wilson
from pipelinerl.inspect.debug_run import read_debug_run
from pipelinerl.inspect.reading import command_parser
from pipelinerl.launcher.command_line import main as launch
from pipelinerl.launcher.command_line import quoted


@dataclass(frozen=True)
class Tally:
    """The attempts at one problem."""

    attempts: int
    solved: int


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its interval of 95 %."""

    value: float
    low: float
    high: float
    problems: int


def pass_at_k(tally: Tally, k: int) -> float:
    """Probability that at least one of k attempts solves the problem, 1 − C(n − c, k) / C(n, k).

    The unbiased estimator of Chen et al., 2021 (arXiv:2107.03374, equation 1), as a product that does not overflow.

    >>> pass_at_k(Tally(attempts=4, solved=1), 2)
    0.5
    """
    n, c = tally.attempts, tally.solved
    if not 0 < k <= n:
        raise ValueError(f"k is {k}: a problem with {n} attempts has pass@1 to pass@{n}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def estimate(tallies: Iterable[Tally], k: int) -> Estimate | None:
    """Mean pass@k of the problems with at least k attempts. None if there are none."""
    counted = [tally for tally in tallies if tally.attempts >= k]
    if not counted:
        return None
    values = [pass_at_k(tally, k) for tally in counted]
    mean = sum(values) / len(values)
    low, high = wilson(mean, min(effective_size(values), sum(tally.attempts for tally in counted)))
    return Estimate(mean, low, high, len(values))


def effective_size(values: Sequence[float]) -> float:
    """Number of single trials whose mean varies as much as the mean of these values in [0, 1]: p(1 − p) / se² (Kish).

    Problems are the sample. If all values agree it is their number. If they nearly agree, it exceeds the attempts.
    """
    count, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else 0.0
    return mean * (1 - mean) / (variance / count) if variance > 0 else float(count)


def powers_up_to(attempts: int) -> list[int]:
    """1, 2, 4, … and the number of attempts itself."""
    return sorted({2**i for i in range(attempts.bit_length()) if 2**i <= attempts} | {attempts})


ALL = "all"
"""Name of the row over every data set, unless one of them has it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: `sys.argv`) and return the exit code."""
    args = parser().parse_intermixed_args(argv)
    ks = chosen_ks(args.k, args.attempts)
    folder = args.keep or Path(tempfile.mkdtemp(prefix="pipelinerl-evaluate-"))
    with contextlib.redirect_stdout(sys.stderr):
        code = launch(arguments_of(args, folder))
    found = (read_debug_run(folder) or {}).get("evaluation")
    if code or found is None:
        if not any(folder.glob("*_0/log.txt")):  # refused, or a dry run
            if not args.keep:
                shutil.rmtree(folder)
            return code
        if code < 128:
            print(f"error: no evaluation; the logs are in {folder}", file=sys.stderr)
        return code or 1
    result = {
        "model": args.model,
        "config": args.config_name or str(run_of(args.model)),
        **evaluated(found, args.attempts, ks),
    }
    print(json.dumps(result, indent=2) if args.json else visible("\n".join(table_lines(result, ks))))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.keep:
        print(f"look at          pipelinerl rollouts {shlex.quote(str(folder))} --test", file=sys.stderr)
    else:
        shutil.rmtree(folder)
        print("the rollouts and logs are deleted; --keep DIR keeps them", file=sys.stderr)
    return 0 if result["complete"] == 1 else 1


def parser() -> argparse.ArgumentParser:
    own = command_parser("evaluate", __doc__)
    own.add_argument("model", help="a model folder, such as an export of a run, or a Hugging Face name")
    own.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as for `pipelinerl launch`")
    own.add_argument("--config-name", "-cn", help="the experiment (default: the run's own, for a model of a run)")
    own.add_argument("--config-dir", "-cd", help="folder of experiments that is searched first")
    own.add_argument("--attempts", type=int, default=1, metavar="N", help="attempts at every problem (1)")
    own.add_argument("--k", metavar="K,K", help="values of k, at most N (1, 2, 4, … N)")
    own.add_argument("--json", action="store_true", help="print the figures as one JSON object instead of a table")
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
    """Return the launcher's command line, with the user's settings last."""
    config_name, config_dir = args.config_name, args.config_dir
    path, run = Path(args.model), run_of(args.model)
    if run is not None and path.parent.is_dir() and not path.exists():  # else it may be a name on the hub
        newest = newest_export(run)
        raise ConfigError(
            f"{args.model!r} does not exist" + (f": the newest model of that run is {newest}" if newest else "")
        )
    if config_name is None:
        if run is None:
            newest = newest_export(path)
            raise ConfigError(
                f"--config-name is missing: {args.model!r} is no model in a run folder"
                + (f", but a run: its newest model is {newest}" if newest else "")
            )
        make_importable(run)
        config_name, config_dir = RUN_CONFIG.stem, run / RUN_CONFIG.parent
    own = {
        "output_dir": str(folder),
        "model_path": args.model,
        "debug.mode": "evaluation",
        "eval.attempts": args.attempts,
        "wandb.mode": "disabled",
    }
    settings = [f"{key}={quoted(value) if isinstance(value, str) else value}" for key, value in own.items()]
    settings += ["stage=rl", "sft.datasets=[]", "sft.test_datasets=[]", "sft.epochs=null", "sft.per_step=0"]
    searched = [f"--config-dir={config_dir}"] if config_dir else []
    return [*searched, f"--config-name={config_name}", *settings, *args.overrides]


def run_of(model: str) -> Path | None:
    """The run folder that a model lies in: an export, or the model that the run began with."""
    return next((folder for folder in Path(model).resolve().parents if (folder / RUN_CONFIG).is_file()), None)


def evaluated(found: Mapping[str, Any], attempts: int, ks: Sequence[int]) -> dict[str, Any]:
    """Compute the figures.

    Args:
        found: the evaluation's figures (`inspect.debug_run`).
        attempts: the number that `--attempts` names.
        ks: values of k, ascending.
    """
    by_set = {name: [Tally(*pair) for pair in pairs] for name, pairs in sorted(found["outcomes"].items())}
    total = ALL if ALL not in by_set else f"{ALL} data sets"
    rows = {**by_set, **({total: [one for tallies in by_set.values() for one in tallies]} if len(by_set) != 1 else {})}
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
    sys.exit(main())
