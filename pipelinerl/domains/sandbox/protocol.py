"""What a sandbox is for domains: it runs a Python program on inputs and tells what was seen.

The embedded sandbox (``runner``), SandboxFusion (``fusion``) and machines of a provider (``remote``) are sandboxes, and
so is any object of the user's own with this method.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ended = Literal["exited", "signal", "time", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen of one run."""

    ended: Ended
    """exited by itself, or by a signal, or the limit that it passed."""
    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    """Its last few KiB."""


class ProgramRunner(Protocol):
    """Runs untrusted programs. One object may serve many rollouts at once."""

    async def run_python(self, code: str, stdins: Sequence[str], *, stop_on_failure: bool = False) -> list[Outcome]:
        """Runs a program once per standard input, until a run does not exit by itself. Runs share nothing.

        Args:
            code: the program.
            stdins: standard inputs.
            stop_on_failure: also stop after the first run with a non-zero exit code.
        Returns:
            The outcomes of the runs that were made, in order. What the program did is an outcome, whatever it was.
        Raises:
            VerifierError: the sandbox failed or did not answer, which says nothing about the program. The attempt is
                repeated and counted, and has no reward.
        """
        ...


async def run_in_turn(
    run: Callable[[str], Awaitable[Outcome]], stdins: Sequence[str], *, stop_on_failure: bool
) -> list[Outcome]:
    """Makes one run after the other, each by ``run`` of its standard input, as long as ``ProgramRunner`` says."""
    outcomes: list[Outcome] = []
    for stdin in stdins:
        outcomes.append(outcome := await run(stdin))
        if outcome.ended != "exited" or (stop_on_failure and outcome.exit_code):
            break
    return outcomes
