"""`pipelinerl doctor --config-name=NAME`: find rewards that can be gamed, before a run.

    pipelinerl doctor --config-name=math --problems 48
    pipelinerl doctor --config-name=quickstart --with-model
    pipelinerl doctor --config-dir=conf --config-name=my_domain --json doctor.json dataset_loader_params.level=2

No server, no GPU and no model: a scripted model plays the training problems with the domain's own judges. Prints each
player's rewards and what is wrong with them. `--with-model` then plays one optimizer batch with the experiment's own
model and servers, and prints how many groups would teach nothing. Exits with 1 if something is wrong, with 2 if the
domain cannot be played.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.domains.contract import Domain, cfg_of_domains, domains_of
from pipelinerl.errors import EXIT_REFUSED, PipelineRLError
from pipelinerl.inspect.debug_run import read_debug_run, rollout_lines
from pipelinerl.inspect.finding import Finding, as_json, found, lines
from pipelinerl.inspect.reading import command_parser, natural
from pipelinerl.launcher.command_line import composed, quoted
from pipelinerl.launcher.command_line import main as launch
from pipelinerl.launcher.doctor.findings import DOMAIN, Seen, earnings
from pipelinerl.launcher.doctor.play import Stage, examine, verifier
from pipelinerl.observability.logging import redacted, shown


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: `sys.argv`) and return the exit code."""
    args = parser().parse_intermixed_args(argv)
    try:
        container, config = composed(args.config_name, args.overrides, args.config_dir)
        with verifier(config) as jobs:
            examined = [examine_domain(domain, {**container, "jobs": jobs}, args) for domain in domains_of(config)]
    except PipelineRLError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return EXIT_REFUSED
    for name, seen, findings in examined:
        print(shown("\n".join(lines_of(name, seen, findings))))
    code = play_with_model(args) if args.with_model else 0
    if args.json:
        text = redacted(json.dumps([data_of(*one) for one in examined], indent=1))
        args.json.write_text(text + "\n", encoding="utf-8")
    return code or int(any(findings for _, _, findings in examined))


def parser() -> argparse.ArgumentParser:
    options = command_parser("doctor", __doc__)
    options.add_argument("--config-name", required=True, metavar="NAME", help="the experiment")
    options.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own configurations")
    options.add_argument("--problems", type=natural, default=24, metavar="N", help="problems that every player plays")
    options.add_argument("--seconds", type=float, default=40.0, metavar="S", help="a slow domain plays fewer problems")
    options.add_argument("--parallel", type=natural, default=8, metavar="N", help="rollouts at a time")
    options.add_argument("--with-model", action="store_true", help="play with the experiment's model, too")
    options.add_argument("--seed", type=int, default=0, help="of the players' random answers")
    options.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    options.add_argument("overrides", nargs="*", metavar="key=value", help="as in `pipelinerl launch`")
    return options


def play_with_model(args: argparse.Namespace) -> int:
    """Plays one optimizer batch in a temporary run folder and prints its figures. Returns the launcher's exit code."""
    with tempfile.TemporaryDirectory(prefix="pipelinerl-doctor-") as folder:
        searched = [f"--config-dir={args.config_dir}"] if args.config_dir else []
        own = [
            f"output_dir={quoted(f'{folder}/run')}",
            "debug.mode=actor",
            "finetune.max_train_steps=1",
            "wandb.mode=disabled",
        ]
        own += ["eval.at_start=false", "eval.at_end=false"]
        with contextlib.redirect_stdout(sys.stderr):
            code = launch([*searched, f"--config-name={args.config_name}", *args.overrides, *own])
        figures = read_debug_run(Path(folder) / "run")
        if figures is not None:
            print("\n".join(rollout_lines(figures)))
    return code


def examine_domain(
    domain: Domain, container: Mapping[str, Any], args: argparse.Namespace
) -> tuple[str, Seen, list[Finding]]:
    rollout = domain.rollout()
    train, test = domain.train_problems(), domain.test_problems()
    stage = Stage(cfg_of_domains(container), rollout, parallel=args.parallel, seed=args.seed)
    seen = asyncio.run(examine(stage, train, test, args.problems, args.seconds))
    return domain.section.name, seen, found(DOMAIN, seen)


def lines_of(name: str, seen: Seen, findings: Sequence[Finding]) -> list[str]:
    rows = [f"{name}: {'player':<24} {'success':>8} {'reward':>8} {'tokens':>8}"]
    rows += [
        f"{'':<{len(name)}}  {player:<24} {success:>8.0%} {reward:>8.3g} {tokens:>8.0f}"
        for player, success, reward, tokens in earnings(seen.rollouts)
    ]
    if seen.answers is None:
        count = len({rollout.problem for rollout in seen.rollouts})
        rows.append(f"no value of the {count} problems is surely the answer: what a right answer earns was not tried")
    return [*rows, *(lines(findings) or ["nothing was found that a policy would exploit"])]


def data_of(name: str, seen: Seen, findings: Sequence[Finding]) -> dict[str, Any]:
    keys = ("player", "success", "reward", "tokens")
    return {
        "domain": name,
        "players": [dict(zip(keys, row, strict=True)) for row in earnings(seen.rollouts)],
        "findings": as_json(findings),
    }


if __name__ == "__main__":
    sys.exit(main())
