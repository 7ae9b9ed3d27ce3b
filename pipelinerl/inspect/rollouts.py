"""`pipelinerl rollouts RUN`: shows what the model was asked, what it answered, and how that was used.

    pipelinerl rollouts results/x                       the newest rollouts, in a pager, coloured
    pipelinerl rollouts results/x --step 40 --best 3    of the batch of one optimizer step, highest reward first
    pipelinerl rollouts results/x --grep 'I cannot'     whose text matches
    pipelinerl rollouts results/x --group 0-17          the attempts at one problem; 0-17/3 is one of them
    pipelinerl rollouts results/x --test --worst 5      of the evaluations

Reads the archive and the topics of a running, stopped or finished run and changes nothing. Sampled text is printed
between « and », in green if the terminal has colours.
"""

import argparse
import contextlib
import heapq
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pipelinerl.config.load import load_old_run
from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.errors import ConfigError, visible
from pipelinerl.inspect.decode import (
    Message,
    TokenText,
    messages_in,
    pieces_of,
    problem_fields,
    sampled_mask,
    text_of,
    text_or_numbers,
)
from pipelinerl.inspect.reading import command_parser, look_into, natural
from pipelinerl.inspect.samples import SeenRollout, matching, read_tests, read_training
from pipelinerl.records.archive import TRAINED
from pipelinerl.streams.codec import jsonable

SHOWN = 20
"""Rollouts without an option that says how many: some screens in a pager."""
ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "bold", "tool": "yellow"}
SAMPLED_STYLE = "green"
TOOL_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    with contextlib.suppress(KeyboardInterrupt), look_into(args.run):
        show(args)
    return 0


def show(args: argparse.Namespace) -> None:
    text = text_or_numbers(args.run, warn_of_numbers)
    found = select(args, text)
    if args.json:
        for seen in found:
            print(json.dumps(as_json(seen, text)))  # in ASCII: some readers take U+2028 for the end of a line
        return
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        os.environ.setdefault("LESS", "-RFX")
        with console.pager(styles=True):
            print_all(console, found, text)
    else:
        print_all(console, found, text)


def print_all(console: Console, found: Iterable[SeenRollout], text: TokenText) -> None:
    count = 0
    for seen in found:
        count += 1
        console.print(rendered(seen, text))
    if not count:
        console.print("no rollout matches", style="dim")


def select(args: argparse.Namespace, text: TokenText) -> Iterable[SeenRollout]:
    """Return the rollouts that the arguments ask for, in the order in which they are shown."""
    found: Iterator[SeenRollout] = matching(rollouts_of(args), group=args.group, domain=args.domain)
    if args.grep:
        pattern = compiled(args.grep)
        found = (seen for seen in found if pattern.search(whole_text(seen, text)))
    if args.best is not None:
        return heapq.nlargest(args.best, found, key=lambda seen: seen.rollout.reward)
    if args.worst is not None:
        return heapq.nsmallest(args.worst, found, key=lambda seen: seen.rollout.reward)
    if args.all or (args.json and args.last is None):
        return found
    last = SHOWN if args.last is None else args.last
    newest = heapq.nlargest(last, enumerate(found), key=lambda entry: (_time(entry[1]), entry[0]))
    return [seen for _, seen in reversed(newest)]


def _time(seen: SeenRollout) -> float:
    """Sort key of a rollout: its step, the weight version of an evaluation, or infinity if it has no step yet."""
    if seen.step is not None:
        return seen.step
    return seen.dispatched_version if seen.is_test else math.inf


def rollouts_of(args: argparse.Namespace) -> Iterator[SeenRollout]:
    replicas = load_old_run(args.run).world.replicas if (args.run / RUN_CONFIG).is_file() else 1
    if args.test:
        tests = read_tests(args.run, replicas=replicas)
        return tests if args.step is None else (t for t in tests if t.dispatched_version == args.step)
    return read_training(args.run, replicas=replicas, step=args.step)


def compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"--grep {pattern!r} is not a regular expression: {error}") from error


def warn_of_numbers(error: ConfigError) -> None:
    print(f"warning: token ids instead of text: {error}", file=sys.stderr)


def messages_of(seen: SeenRollout, text: TokenText) -> list[list[Message]]:
    """Return the messages of every sequence of a rollout."""
    return [
        messages_in(pieces_of(sequence, seen.rollout.images, text), sampled_mask(sequence).tolist())
        for sequence in seen.rollout.sequences
    ]


def whole_text(seen: SeenRollout, text: TokenText) -> str:
    rollout = seen.rollout
    return "\n".join(text_of(sequence, rollout.images, text) for sequence in rollout.sequences)


def headline(seen: SeenRollout) -> str:
    """Describe a rollout in one line, without its text."""
    versions = "–".join(map(str, dict.fromkeys((*seen.versions[:1], *seen.versions[-1:])))) or "–"
    outcome = seen.outcome if seen.step is None or seen.outcome == TRAINED else f"dropped: {seen.outcome}"
    facts = [
        seen.sample_id,
        outcome if seen.step is None else f"{outcome}, step {seen.step}",
        f"{seen.domain}/{seen.dataset}",
        f"reward {seen.rollout.reward:.4g}",
        *([f"advantage {seen.advantage:+.3g}"] if seen.advantage is not None else []),
        *(["success" if seen.success else "no success"] if seen.success is not None else []),
        f"versions {versions}",
        *([f"lag {seen.lag}"] if seen.lag is not None else []),
        f"{seen.rollout.num_sampled} tokens",
        f"ended by {seen.finish_reason}",
        *seen.flags,
    ]
    return "  ".join(facts)


def rendered(seen: SeenRollout, text: TokenText) -> Text:
    """Render a rollout for the terminal, where no character of a record has an effect."""
    out = Text()
    out.append_text(styled(f"── {headline(seen)}\n", "bold"))
    for name, value in problem_fields(seen.problem).items():
        told = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        out.append_text(styled(f"   {name}: {told}\n", "dim"))
    for number, messages in enumerate(messages_of(seen, text)):
        if number:
            out.append(f"   (training sequence {number}: its tokens do not extend the one before)\n", "dim")
        for message in messages:
            out.append_text(styled(f"[{message.role or 'text'}] ", ROLE_STYLES.get(message.role, "bold")))
            for part, sampled in message.parts:
                out.append_text(styled(f"«{part}»" if sampled else part, SAMPLED_STYLE if sampled else ""))
            out.append("\n")
    return out


def styled(part: str, style: str) -> Text:
    text = Text(visible(part), style)
    text.highlight_regex(TOOL_CALL, "yellow")
    return text


def as_json(seen: SeenRollout, text: TokenText) -> dict[str, Any]:
    """Return a rollout as values that JSON can hold."""
    rollout = seen.rollout
    return jsonable(
        {
            "sample_id": seen.sample_id,
            "step": seen.step,
            "fate": seen.outcome,
            "domain": seen.domain,
            "dataset": seen.dataset,
            "problem": problem_fields(seen.problem),
            "reward": rollout.reward,
            "metrics": rollout.metrics,
            "advantages": list(seen.advantages),
            "versions": list(seen.versions),
            "lag": seen.lag,
            "sampled_tokens": seen.rollout.num_sampled,
            "finish_reason": seen.finish_reason,
            "latency_s": rollout.latency_s,
            "servers": list(rollout.servers),
            "flags": list(seen.flags),
            "sequences": [
                {
                    "messages": [
                        {"role": message.role, "parts": [{"text": t, "sampled": s} for t, s in message.parts]}
                        for message in messages
                    ],
                    "token_ids": sequence.token_ids,
                    "logprobs": sequence.logprobs,
                    "spans": sequence.spans,
                }
                for sequence, messages in zip(rollout.sequences, messages_of(seen, text), strict=True)
            ],
        }
    )


def parser() -> argparse.ArgumentParser:
    own = command_parser("rollouts", __doc__)
    own.add_argument("run", type=Path, help="the run folder")
    own.add_argument("--step", type=natural, help="of this optimizer step; with --test of this weight version")
    own.add_argument("--group", help="of one problem's attempts, or one attempt (0-17/3)")
    own.add_argument("--domain", help="of one domain or data set")
    own.add_argument("--grep", metavar="REGEX", help="whose text matches")
    own.add_argument("--test", action="store_true", help="rollouts of evaluations instead of training")
    own.add_argument("--json", action="store_true", help="one JSON object per line")
    some = own.add_mutually_exclusive_group()
    some.add_argument("--best", type=natural, metavar="K", help="the K with the highest rewards")
    some.add_argument("--worst", type=natural, metavar="K", help="the K with the lowest rewards")
    some.add_argument("--last", type=natural, metavar="K", help=f"the newest K ({SHOWN}; with --json all)")
    some.add_argument("--all", action="store_true", help="all of them")
    return own


if __name__ == "__main__":
    sys.exit(main())
