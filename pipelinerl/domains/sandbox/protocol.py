"""The interface of a sandbox: it runs a Python program on inputs and returns the outcomes.

The embedded sandbox (``runner``), SandboxFusion (``fusion``) and machines of a provider (``remote``) have it, as may an
object of the user's.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Ended = Literal["exited", "signal", "time", "memory", "output"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one run."""

    ended: Ended
    """Whether it exited by itself, ended by a signal, or passed the named limit."""
    exit_code: int
    seconds: float
    stdout: str
    stderr: str
    """The last few KiB of its error output."""


class ProgramRunner(Protocol):
    """Runs untrusted programs. One object may serve many rollouts at once."""

    async def run_python(self, code: str, stdins: Sequence[str]) -> list[Outcome]:
        """Runs a program once per standard input, until a run does not exit by itself. Runs share nothing.

        Args:
            code: the program.
            stdins: standard inputs.
        Returns:
            The outcomes of the runs that were made, in order. No behaviour of the program raises.
        Raises:
            VerifierError: the sandbox failed or did not answer. The attempt is repeated and counted, without a reward.
        """
        ...


async def run_in_turn(run: Callable[[str], Awaitable[Outcome]], stdins: Sequence[str]) -> list[Outcome]:
    """Makes one run after the other with ``run(stdin)``, and stops as ``ProgramRunner.run_python`` does."""
    outcomes: list[Outcome] = []
    for stdin in stdins:
        outcomes.append(outcome := await run(stdin))
        if outcome.ended != "exited":
            break
    return outcomes
