"""`pipelinerl check DATA…`: which rows of data sets a domain would use, and why it leaves the others out.

    pipelinerl check rows.jsonl data/
    pipelinerl check --as coding problems.parquet --column task=prompt --json
    pipelinerl check --as my_module.load_problems rows.jsonl
    pipelinerl check --config-name=math --config-dir=conf train_dataset_names=[rows.jsonl]

Reads the data as a run would, without one: no server, no GPU, no model. With --config-name the data sets are those of
the experiment, and DATA are its settings (key=value). Exits with 2 if a run would refuse a data set, else with 0.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipelinerl.config.sections import DomainSection
from pipelinerl.domains import rows
from pipelinerl.domains.contract import Domain, domains_of
from pipelinerl.domains.rows import RowReport, collected_reports
from pipelinerl.errors import EXIT_REFUSED, ConfigError, DomainError
from pipelinerl.inspect.reading import command_parser
from pipelinerl.launcher.command_line import composed
from pipelinerl.observability.logging import show_prints
from pipelinerl.preprocess import conversation_rows
from pipelinerl.preprocess.conversation_rows import load_conversations

SHIPPED = ("math", "coding")
"""The shipped domains that read data without further keys."""
SFT = "sft"
"""Stands for conversations to imitate, `sft.datasets`."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One data set as a domain's loader reads it."""

    domain: str
    dataset: str
    problems: int
    reports: Sequence[RowReport]
    """Empty: the loader makes problems of its own, or does not count rows."""
    refusal: str | None
    """Why a run would refuse it."""

    def lines(self) -> list[str]:
        """The printed lines: one for each report and reason, and the refusal."""
        title = f"{self.domain}: {self.dataset}"
        found = [] if self.reports or self.refusal else [f"{title}: {self.problems} problems"]
        for report in self.reports:
            found.append(f"{title}: {report.kept} rows kept, {report.left_out.total()} left out")
            found += [f"  {line}" for line in report.lines()]
        return found if self.refusal is None else [*found, f"refused: {self.refusal}"]

    def as_json(self) -> dict[str, Any]:
        reasons = [
            {"reason": reason, "rows": count, "first": report.examples[reason]}
            for report in self.reports
            for reason, count in report.left_out.most_common()
        ]
        kept = sum(report.kept for report in self.reports) if self.reports else self.problems
        left_out = sum(report.left_out.total() for report in self.reports)
        own = {"domain": self.domain, "dataset": self.dataset, "kept": kept, "left_out": left_out}
        return own | {"reasons": reasons, "refusal": self.refusal}


def check(name: str, dataset: str, load: Callable[[], int]) -> Checked:
    """Reads one data set. ``load`` returns its number of problems and raises ``DomainError`` where a run would."""
    problems = 0
    with collected_reports() as reports:
        try:
            problems = load()
            refusal = None if problems else f"dataset {dataset!r} has no problem"
        except DomainError as error:
            cause = error.__cause__
            refusal = str(cause if isinstance(cause, DomainError) else error)
    return Checked(domain=name, dataset=dataset, problems=problems, reports=reports, refusal=refusal)


def asked(args: argparse.Namespace) -> Iterator[tuple[str, str, Callable[[], int]]]:
    """The data sets to check: name of the domain, name of the data set, and what reads it."""
    if args.config_name:
        if args.column or args.max_left_out is not None:
            raise DomainError(
                "--column and --max-left-out have no effect with --config-name: write its keys, as "
                "+dataset_loader_params.columns.task=prompt"
            )
        _, config = composed(args.config_name, args.data, args.config_dir)
        for domain in () if config.stage == SFT else domains_of(config):
            for name in dict.fromkeys((*domain.section.train_dataset_names, *domain.section.test_dataset_names)):
                yield domain.section.name, name, partial(num_problems, domain, name)
        for name in config.sft.datasets:
            yield SFT, name, partial(num_conversations, name, config.sft.max_left_out)
        return
    if args.domain == SFT and args.column:
        raise DomainError("--column has no effect with --as sft: rename the columns (docs/guides/sft.md)")
    params: dict[str, Any] = {"columns": dict(args.column)} if args.column else {}
    params |= {} if args.max_left_out is None else {"max_left_out": args.max_left_out}
    section = DomainSection(
        name=args.domain,
        weight=1.0,
        rollout_policy="",
        dataset_loader=f"pipelinerl.domains.{args.domain}.load_problems" if args.domain in SHIPPED else args.domain,
        dataset_loader_params=params,
        train_dataset_names=args.data,
        test_dataset_names=[],
    )
    for name in args.data:
        if args.domain == SFT:
            yield SFT, name, partial(num_conversations, name, params.get("max_left_out", rows.MAX_LEFT_OUT))
        else:
            yield args.domain, name, partial(num_problems, Domain(section, several=False), name)


def num_problems(domain: Domain, dataset: str) -> int:
    return len(domain.problems([dataset]))


def num_conversations(dataset: str, max_left_out: float) -> int:
    conversations, _ = load_conversations([dataset], max_left_out)
    return len(conversations)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (None: `sys.argv`) and return the exit code."""
    args = parser().parse_intermixed_args(argv)
    found = [check(*one) for one in asked(args)]
    if not found:
        raise ConfigError("name a data set, or an experiment with --config-name")
    if args.json:
        print(json.dumps([one.as_json() for one in found], indent=1))
    else:
        print("\n".join(line for one in found for line in one.lines()))
    return EXIT_REFUSED if any(one.refusal for one in found) else 0


def parser() -> argparse.ArgumentParser:
    found = command_parser("check", __doc__)
    found.add_argument("data", nargs="*", metavar="DATA", help="a file, a folder, a pattern, or a name on the Hub")
    found.add_argument(
        "--as",
        default="math",
        dest="domain",
        metavar="NAME",
        help=f"{', '.join(SHIPPED)}, {SFT}, or a loader's dotted name",
    )
    found.add_argument("--column", action="append", type=pair, metavar="FIELD=COLUMN", help="as in `columns`")
    found.add_argument("--max-left-out", type=share, metavar="SHARE", help="of the rows, from 0 to 1")
    found.add_argument("--config-name", metavar="NAME", help="check the data sets of this experiment")
    found.add_argument("--config-dir", type=Path, metavar="DIR", help="folder of your own configurations")
    found.add_argument("--json", action="store_true", help="print JSON")
    return found


def share(text: str) -> float:
    if not 0 <= (value := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value


def pair(text: str) -> tuple[str, str]:
    field, equals, column = text.partition("=")
    if not field or not equals or not column:
        raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=COLUMN, as task=prompt")
    return field, column


if __name__ == "__main__":
    show_prints()  # those of loaders, too
    for module in (rows, conversation_rows):
        logging.getLogger(module.__name__).setLevel(logging.ERROR)  # what they log is printed
    sys.exit(main())
