"""One node's part of a server that spans several: vLLM's workers, whose engine is on the server's node 0.

Consumes: what the engine sends to all workers of the server. Each worker takes its weights at an address of its own.
Waits for: node 0, at the start. Ends: when asked to, or with an error when a worker or node 0 has ended. Whoever
started the parts starts them again together.
"""

import contextlib
import logging
import socket
import time
from collections.abc import Sequence

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from pipelinerl.errors import PipelineRLError
from pipelinerl.inference.server import HEARTBEAT_S, parse_arguments
from pipelinerl.inference.signals import signals_end_the_start
from pipelinerl.membership.role import RoleContext
from pipelinerl.world import Span

log = logging.getLogger(__name__)

CONNECT_S = 30.0
"""Time for node 0 to answer at the place where the workers have just met."""


class PartEndedError(PipelineRLError):
    """The other parts of the server, or a worker of this one, have ended."""


def serve_part(arguments: Sequence[str], span: Span, context: RoleContext) -> None:
    """Run this node's workers until SIGTERM. ``span`` is a part other than node 0.

    Raises:
        PartEndedError: node 0 or a worker of this node has ended.
    """
    status, membership = context.status, context.membership
    args = AsyncEngineArgs.from_cli_args(parse_arguments(arguments))
    config = args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
    with status.waiting("the server's other nodes"), signals_end_the_start(status, context.stop):
        executor = MultiprocExecutor(config, monitor_workers=False)
    try:
        with contextlib.closing(connect(span)) as node_0:
            if membership is not None:
                membership.announce(state="ready")
            log.info("event=part_ready node=%d nodes=%d meet=%s:%d", span.node, span.nodes, span.host, span.port)
            while not context.stop.wait(HEARTBEAT_S):
                status.progress(node=span.node)
                status.beat_with_progress()
                if is_closed(node_0):
                    raise PartEndedError(f"node 0 of the server, {span.host}:{span.port}, has ended")
                if dead := [worker.proc.name for worker in executor.workers if not worker.proc.is_alive()]:
                    raise PartEndedError(f"{', '.join(dead)} of this node ended: its error is above")
    finally:
        executor.shutdown()


def connect(span: Span) -> socket.socket:
    """Return a connection to the store where the workers met. It lives as long as node 0's first worker.

    Raises:
        PartEndedError: there is none.
    """
    deadline = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((span.host, span.port), CONNECT_S)
        except OSError as error:
            if time.monotonic() > deadline:
                raise PartEndedError(f"node 0 of the server, {span.host}:{span.port}, is gone: {error}") from error
            time.sleep(1)
            continue
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        return connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection on which it never sends anything."""
    connection.setblocking(False)
    try:
        return not connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
