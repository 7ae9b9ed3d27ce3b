"""``python -m pipelinerl.domains.environments --run-dir R --job environment_0``

Runs until the role is asked to stop. The server's answers are the role's heartbeat. If the server freezes or ends, the
role counts as frozen or failed, and the supervisor restarts both.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from pipelinerl.errors import TransportError
from pipelinerl.membership.role import RoleContext, run_role
from pipelinerl.utils import is_healthy
from pipelinerl.world.network import listen_address
from pipelinerl.world.process import kept

POLL_S = 0.5
"""Interval of heartbeats, far below `launcher.heartbeat_timeout_s`, and longest delay of a stop."""
STOP_S = 5.0
"""Seconds from SIGTERM to SIGKILL of the server, which may still write files."""


def main(context: RoleContext) -> None:
    """Raises ``TransportError`` when the server ends by itself."""
    job = context.job
    with serving(context) as server:
        while not context.stop.is_set():
            code = server.poll()
            if code is not None:
                raise TransportError(
                    f"environment {job.environment_key!r} ended with code {code}: its last lines are above in this log"
                )
            if is_healthy(job.url):
                context.status.progress(port=job.port or 0)
                context.status.beat_with_progress()
            context.stop.wait(POLL_S)


@contextlib.contextmanager
def serving(context: RoleContext) -> Iterator["subprocess.Popen[bytes]"]:
    """Yields the environment's process. It ends with the block, and with the role, however that ends."""
    job = context.job
    where = ("--run-dir", str(context.run_dir), "--index", str(job.environment_index))
    address = ("--port", str(job.port), "--host", listen_address(job.hostname) or context.world.bind_host)
    command = (sys.executable, "-m", "pipelinerl.domains.environments.serve", *where, *address)
    process = subprocess.Popen(kept(command))
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    run_role(main)
