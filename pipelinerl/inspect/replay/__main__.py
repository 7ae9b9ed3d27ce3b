"""`pipelinerl replay RUN --step N`: computes an optimizer step again and shows each token's part of its loss.

    pipelinerl replay results/x --step 40                      is it what the run recorded? which tokens made the loss?
    pipelinerl replay results/x --step 40 --with policy_loss=ppo --with epsilon_high=0.3
                                                               what another objective would have done
    pipelinerl replay results/x --step 40 --mismatch           why trainer and server differ, and what to do

A step is counted as in `pipelinerl rollouts --step`. It is computed from the newest checkpoint at or before it, on as
many ranks as the run had. On CPUs of one kind with the same torch it is bit-equal. Exit code 1 says that it is not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipelinerl.config.engine import engine_of, traits_of
from pipelinerl.config.load import load_old_run
from pipelinerl.errors import ConfigError, PipelineRLError, visible
from pipelinerl.inspect.decode import text_or_numbers
from pipelinerl.inspect.reading import command_parser, look_into, natural
from pipelinerl.inspect.replay import folder as files
from pipelinerl.inspect.replay import show
from pipelinerl.inspect.replay.compare import compare_step
from pipelinerl.inspect.replay.folder import Recorded, ReplayedStep, ReplayPlan
from pipelinerl.inspect.replay.mismatch import attribute
from pipelinerl.streams.codec import jsonable
from pipelinerl.world.cluster import LOOPBACK


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    from pipelinerl.inspect.replay import inputs  # imports torch, which --help does not need

    changes = dict(map(setting, args.changes))
    with tempfile.TemporaryDirectory(prefix="replay-") as made:
        folder = Path(made)
        with look_into(args.run):
            if args.step is None:
                raise ConfigError(f"--step is missing: {inputs.replayable(args.run)}")
            files.changed_settings(load_old_run(args.run), changes)  # refuses a wrong key before anything is computed
            plan = inputs.collect_inputs(args.run, args.step, folder)
            recorded = inputs.recorded(args.run, args.step)
        own, other = computed(folder, plan, changes, mismatch=args.mismatch)
        return report(args, plan, recorded, own, other)


def computed(
    folder: Path, plan: ReplayPlan, changes: dict[str, Any], *, mismatch: bool = False
) -> tuple[ReplayedStep, ReplayedStep | None]:
    """The step under the run's objective, and under the changed one, if any."""
    from pipelinerl.inspect.replay.rank import OTHER, OWN, replay

    if plan.num_ranks == 1 and not traits_of(engine_of(load_old_run(plan.run_dir), 1)).always_in_a_group:
        replay(folder, changes, mismatch=mismatch)
    else:
        run_ranks(folder, plan, changes, mismatch)
    own = files.read_results(folder, OWN, plan.num_ranks)
    return own, files.read_results(folder, OTHER, plan.num_ranks) if changes else None


def run_ranks(folder: Path, plan: ReplayPlan, changes: dict[str, Any], mismatch: bool) -> None:
    """Start the plan's ranks on this machine and wait for them."""
    ranks = str(plan.num_ranks)
    command = [sys.executable, "-m", "pipelinerl.finetune.ranks", "--ranks", ranks, "--world-size", ranks]
    command += ["--first-rank", "0", "--master-addr", LOOPBACK, "--master-port", "0", "--"]
    command += ["-m", "pipelinerl.inspect.replay.rank", str(folder), json.dumps(changes), json.dumps(mismatch)]
    environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, encoding="utf-8")
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise PipelineRLError(f"a rank of the replay failed with exit code {done.returncode}; its output is above")


def report(
    args: argparse.Namespace, plan: ReplayPlan, recorded: Recorded, own: ReplayedStep, other: ReplayedStep | None
) -> int:
    """Print the results and return the exit code."""
    found = compare_step(recorded, own)
    split = attribute(own.sequences, has_experts=has_experts(args.run)) if args.mismatch and own.sequences else None
    if args.json:
        shown = show.as_json(plan, found, own, other)
        print(json.dumps(jsonable(shown | ({"mismatch": asdict(split), "cause": split.largest} if split else {}))))
    else:
        text = text_or_numbers(args.run)
        lines = [*show.heading(plan, own), *show.verdict(found), *show.objectives(own, other)]
        lines += split.lines if split else []
        if own.sequences:
            lines.append("tokens with the largest parts of the loss:")
            lines += show.token_table(own, show.largest_tokens(own, args.tokens), text, other)
        if own.sequences and other is not None:
            lines.append("tokens that --with pushes most differently:")
            lines += show.token_table(own, show.largest_tokens(own, args.tokens, other), text, other)
        print(visible("\n".join(lines)))
    return 0 if found.is_equal else 1


def has_experts(run_dir: Path) -> bool:
    """Whether the model is a mixture of experts, by its configuration."""
    from transformers import AutoConfig

    cfg = load_old_run(run_dir)
    config = AutoConfig.from_pretrained(cfg.model_path, trust_remote_code=cfg.trust_remote_code).get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def setting(text: str) -> tuple[str, Any]:
    """`key=value` of `--with`. The value is JSON, or else a string."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--with {text}: write key=value, e.g. policy_loss=ppo")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parser() -> argparse.ArgumentParser:
    own = command_parser("replay", __doc__)
    own.add_argument("run", type=Path, help="the run folder")
    own.add_argument("--step", type=natural, help="the optimizer step")
    own.add_argument(
        "--with",
        dest="changes",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of finetune.rl's loss, or share_prefixes=off, for a second computation",
    )
    own.add_argument("--mismatch", action="store_true", help="split the gap between trainer and server into causes")
    own.add_argument("--tokens", type=natural, default=12, metavar="K", help="tokens to show (%(default)s)")
    own.add_argument("--json", action="store_true", help="everything as one JSON object")
    return own


if __name__ == "__main__":
    sys.exit(main())
