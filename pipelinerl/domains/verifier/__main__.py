"""Role ``verifier``: serves checks until SIGTERM."""

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.reward_functions import verifier_of
from pipelinerl.domains.verifier.app import create_app
from pipelinerl.errors import VerifierError
from pipelinerl.membership.role import RoleContext, run_role
from pipelinerl.world.network import listen_address
from pipelinerl.world.tls import server_files

log = logging.getLogger(__name__)

POLL_S = 0.2
"""Interval of heartbeats, and longest delay of a stop."""


def main(context: RoleContext) -> None:
    """Serves on the job's port. A world on loopback listens only there, any other world requires the run's secret."""
    closed = not context.world.is_open
    app = create_app(verifier_of(context.cfg), secret=None if closed else os.environ[SECRET_VARIABLE])
    assert context.job.port is not None, "the world map gives every verifier a port"
    tls = server_files(context.cfg.world, context.job.hostname)
    config = uvicorn.Config(
        app,
        host=listen_address(context.job.hostname) or context.world.bind_host,
        port=context.job.port,
        log_config=None,
        access_log=False,
        lifespan="on",
        ssl_certfile=tls[0] if tls else None,
        ssl_keyfile=tls[1] if tls else None,
    )
    asyncio.run(serve(VerifierServer(config), context))


class VerifierServer(uvicorn.Server):
    """Installs no signal handlers, because the role handles signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(server: VerifierServer, context: RoleContext) -> None:
    """Runs the server until the role is asked to stop. Raises ``VerifierError`` if the server ends before that."""
    serving = asyncio.create_task(server.serve())
    while not context.stop.is_set() and not serving.done():
        context.status.progress(port=context.job.port or 0)
        await asyncio.wait({serving}, timeout=POLL_S)
    server.should_exit = True
    await serving
    if not context.stop.is_set():
        raise VerifierError(f"the verifier stopped serving on port {context.job.port}: see the lines above")


if __name__ == "__main__":
    run_role(main)
