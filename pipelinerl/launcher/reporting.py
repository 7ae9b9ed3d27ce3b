"""Writes the reports of a run at its end. One that fails is left out with a warning, and the run ends as it would."""

import asyncio
import logging
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from pipelinerl.config.environment import REDIS_PASSWORD_VARIABLE
from pipelinerl.config.paths import REPORT_FILE
from pipelinerl.config.sections import Config
from pipelinerl.inspect.debug_run import debug_run_figures, debug_run_lines, write_debug_run
from pipelinerl.inspect.ending import RunEnding, write_ending
from pipelinerl.inspect.report import summary_lines, write_report
from pipelinerl.launcher.processes import STOP_SIGNALS, Host
from pipelinerl.launcher.supervisor import Ending
from pipelinerl.launcher.tracking import RunTracking

log = logging.getLogger(__name__)

FAILED_REPORT_S, STOPPED_REPORT_S = 60.0, 15.0
"""Limits for the page of a failed or a stopped run. The user waits for the second."""


class RunReports:
    """Writes a run's summary, picture and page.

    Args:
        path: the run folder.
        say: prints a line for the user.
        tracking: trackers that keep the page. None: no page is written.
    """

    def __init__(self, config: Config, path: Path, say: Callable[[str], None], tracking: RunTracking | None = None):
        self._config, self._path, self._say, self._tracking = config, path, say, tracking

    def debug_run(self, *, finished: bool) -> None:
        """Print what standalone roles did (`debug.mode`)."""
        try:
            figures = debug_run_figures(self._path, self._config)
            if finished:
                write_debug_run(self._path, figures)
        except Exception as error:  # noqa: BLE001 — the report is an extra: its failure is only reported
            self._missing("summary", error)
            return
        for line in debug_run_lines(figures, self._path):
            self._say(line)

    def complete(self, *, launched: float, started: float) -> None:
        """Write summary, picture and page of a complete run.

        Args:
            launched: Unix time of the launcher's start.
            started: Unix time of the roles' start.
        """
        if self._config.debug.mode:
            self.debug_run(finished=True)
            return
        try:
            summary = write_report(self._path, self._config, launched=launched, started=started)
        except Exception as error:  # noqa: BLE001 — as above
            self._missing("summary", error)
            return
        self._say("")
        for line in summary_lines(summary, self._path):
            self._say(line)
        from pipelinerl.inspect.page.build import write_page

        try:
            write_page([self._path], self._path / REPORT_FILE)
            self._keep()
        except Exception as error:  # noqa: BLE001 — as above
            self._missing(REPORT_FILE, error)

    async def unfinished(self, ending: Ending, host: Host) -> None:
        """Record why an incomplete run ended, and write its page in a child process that a stop signal ends at once."""
        if self._config.debug.mode and ending.kind == "stopped":
            self.debug_run(finished=False)
        if ending.kind == "done" or self._tracking is None or self._config.debug.mode:
            return
        hurried = asyncio.Event()
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, hurried.set)
        try:
            write_ending(self._path, record := ending_record(ending))
            await asyncio.sleep(0.01)  # handles a signal that came while the roles were ending
            if not hurried.is_set():
                limit_s = FAILED_REPORT_S if record.kind == "failed" else STOPPED_REPORT_S
                told = f"the run failed: {record.reason}" if record.kind == "failed" else record.reason
                self._say(f"{told}; writing {REPORT_FILE} for at most {limit_s:g} s; another Ctrl-C does not wait")
                await self._write_page(host, limit_s, hurried)
        except Exception as error:  # noqa: BLE001 — as above
            self._missing(REPORT_FILE, error)

    async def _write_page(self, host: Host, limit_s: float, hurried: asyncio.Event) -> None:
        """Write the page in a child process."""
        environment = {**host.environment, **host.mark.variables("report")}
        if not self._config.streams.external:  # the run's own redis has ended: its data are read, not the server
            environment.pop(REDIS_PASSWORD_VARIABLE, None)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pipelinerl", "report", str(self._path)),
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        ended, told = asyncio.create_task(child.communicate()), asyncio.create_task(hurried.wait())
        await asyncio.wait({ended, told}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if not ended.done():
            host.sweep("report", 0)
            await ended
            why = "not awaited" if hurried.is_set() else f"it took more than {limit_s:g} s"
        elif child.returncode:
            lines = ended.result()[1].decode(errors="replace").strip().splitlines()
            why = lines[-1] if lines else f"exit code {child.returncode}"
        else:
            self._keep()
            return
        self._say(f"no {REPORT_FILE}: {why}; `pipelinerl report {shlex.quote(str(self._path))}` makes it")

    def _keep(self) -> None:
        if self._tracking:
            self._tracking.keep(self._path / REPORT_FILE)

    def _missing(self, what: str, error: Exception) -> None:
        log.error("event=report_failed what=%s", what, exc_info=error)
        self._say(f"warning: no {what}: {type(error).__name__}: {error}")


def ending_record(ending: Ending) -> RunEnding:
    """The ending of a run that is not complete, in one line."""
    if ending.kind == "stopped":
        return RunEnding(kind="stopped", reason=f"stopped by {ending.reason}")
    failure = ending.failure
    parts = [ending.reason] if ending.reason else []
    if failure:
        parts.append(f"{failure.job} failed: {failure.reason}; its last error: {failure.error_line}")
    return RunEnding(kind="failed", reason="; ".join(parts), job=failure.job if failure else None)
