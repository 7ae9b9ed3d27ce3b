"""One thing that was found in a run, a domain or a machine, and its forms: a line, numbered lines, JSON. Pure."""

import dataclasses
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

Seen = TypeVar("Seen")


class Level(IntEnum):
    """What failed. Findings are shown in this order: what fails earlier explains what fails later."""

    FAILED = 0
    """The run or the check itself."""
    DELIVERY = 1
    """The servers or the domain: what the policy is asked, with which weights, and who judges it."""
    REWARD = 2
    """What is paid for."""
    TASK = 3
    """The problems teach nothing."""
    STEP = 4
    """The optimizer's steps."""
    SYMPTOM = 5
    """What the policy became."""
    OUTCOME = 6
    """A result, of any cause."""
    SLOW = 7
    """Not about learning: the run would reach the same, sooner."""
    NOTED = 8
    """A fact without a bound."""
    PASSED = 9
    NOT_RUN = 10

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class Finding:
    level: Level
    title: str
    """Does not depend on figures: it identifies a finding in tests, trackers and the page."""
    evidence: str
    """What was seen, with its figures."""
    fix: str = ""
    """What to do that is not done already."""
    command: str = "pipelinerl report {run}"
    """What shows the evidence, with `{run}` and `{step}` to be filled in."""
    step: int | None = None
    """First optimizer step to which it applies. None = all of them."""
    about: str = ""
    """A server. While a run goes on, each title is shown once per `about`."""

    @property
    def head(self) -> str:
        since = "" if self.step is None else f" since step {self.step}"
        return f"{self.title}{since}: {self.evidence}"

    def line(self) -> str:
        return f"{self.head}. {self.fix}"

    def command_in(self, run_dir: Path) -> str:
        command = self.command.replace("{step}", str(self.step or 0))  # no format: a group's name may have braces
        return command.replace("{run}", shlex.quote(str(run_dir)))


def found(checks: Iterable[Callable[[Seen], Iterable[Finding]]], seen: Seen) -> list[Finding]:
    """What all checks find, in the order in which it is shown."""
    return in_order(finding for check in checks for finding in check(seen))


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """By level, then by first step. Others keep their order."""
    return sorted(findings, key=lambda finding: (finding.level, -1 if finding.step is None else finding.step))


def lines(findings: Sequence[Finding], run_dir: Path | None = None) -> list[str]:
    """Numbered findings for the terminal. Of a run each has the command that shows its evidence."""
    text = []
    for number, finding in enumerate(findings, 1):
        text.append(f"{number}. {finding.head}")
        if run_dir is not None:
            text.append(f"   look: {finding.command_in(run_dir)}")
        text.append(f"   do:   {finding.fix}")
    return text


def as_json(findings: Iterable[Finding], run_dir: Path | None = None) -> list[dict[str, Any]]:
    """The findings as plain data, with the level's word. The fields about a run are left out where there is none."""
    of_a_run = {"command", "step", "about"}
    return [
        {name: value for name, value in dataclasses.asdict(one).items() if run_dir is not None or name not in of_a_run}
        | {"level": one.level.word}
        | ({} if run_dir is None else {"command": one.command_in(run_dir)})
        for one in findings
    ]
