"""vLLM's own application with our routes and access control around it.

Owns the server's process: builds the engine, serves until SIGTERM, tells the heartbeat that the engine answers.
"""

import asyncio
import logging
import os
import signal
import threading
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.launcher import serve_http, setup_server
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM

from pipelinerl.chat.images import placeholder_of
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.sections.serving import VLLMSection, WeightsSection
from pipelinerl.errors import LeftError, PipelineRLError
from pipelinerl.inference import answers, weight_update
from pipelinerl.inference.admission import Admission, Load
from pipelinerl.inference.answers import Answers
from pipelinerl.inference.images import ImagePrompts
from pipelinerl.inference.signals import end_when_asked, signals_end_the_start
from pipelinerl.inference.weight_update import SwapFailedError, UpdateControl
from pipelinerl.membership.entry import Membership
from pipelinerl.membership.lease import count_parts
from pipelinerl.observability.status import RoleStatus
from pipelinerl.weights.load.store_follower import StoreFollower
from pipelinerl.weights.protocol import Address, Averaging, WeightInfo
from pipelinerl.world import Span
from pipelinerl.world.process import die_with_parent

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args  # vLLM 0.33
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
"""Time between two heartbeats, a small part of `launcher.heartbeat_timeout_s`."""
IDLE_BEATS = 2
"""A server that leaves ends after this many heartbeats without requests: by then actors know that it drains."""
GRACEFUL_S = 1
"""Seconds that requests under way get when the server is asked to end."""
KEEP_ALIVE_S = 300
"""Longer than any client keeps an idle connection, so that no request meets one that is being closed."""
FATAL_EXIT = 70
"""Exit code of a server that cannot go on: EX_SOFTWARE of sysexits.h."""


class ServerEndedError(PipelineRLError):
    """The server ended without being asked to."""


class VllmEngine:
    """vLLM's engine as the weight update sees it."""

    def __init__(self, client: AsyncLLM):
        self._client = client

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return await self._client.collective_rpc(method, args=args)

    async def swap(self, version: int) -> tuple[float, float]:
        pause_ms, swap_ms, failure = await self._client.engine_core.call_utility_async("swap_weights", version)
        if failure:
            raise SwapFailedError(failure)
        return pause_ms, swap_ms

    async def version(self) -> str:
        return await self._client.get_weight_version()


class LoadReader:
    """Reads the load of the engine's scheduler."""

    def __init__(self, client: AsyncLLM):
        self._client = client
        self._finished = self._preempted = 0

    async def read(self) -> Load:
        """Return the load, with the requests that ended and were preempted since the last reading."""
        use, running, waiting, finished, preempted = await self._client.engine_core.call_utility_async("server_load")
        load = Load(
            kv_use=use,
            running=running,
            waiting=waiting,
            finished=finished - self._finished,
            preempted=preempted - self._preempted,
        )
        self._finished, self._preempted = finished, preempted
        return load


def parse_arguments(arguments: Sequence[str]) -> Namespace:
    """vLLM's own parser and checks."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(list(arguments))
    validate_parsed_serve_args(args)
    return args


@dataclass(frozen=True, kw_only=True)
class Service:
    """What the server does beyond serving vLLM.

    ``score_temperature`` None = a policy server, which takes weights. Otherwise one that scores at this temperature,
    whose weights are frozen, or an average of those that it takes (``averaging``).
    """

    vllm: VLLMSection
    """The servers' section of the configuration: an option of it is read where it acts."""
    weights: WeightsSection
    score_temperature: float | None = None
    averaging: Averaging | None = None
    first_rollouts: int | None = None
    """Rollouts at a time that the server takes at first. Its lease then says how many, by its load. None = fixed."""
    span: Span | None = None
    """The server is node 0 of several."""
    store: str | None = None
    """Where a policy server fetches its weights (`pipelinerl.config.paths.weight_store`). None = it is told to pull."""


def serve(
    arguments: Sequence[str],
    *,
    service: Service,
    status: RoleStatus,
    stop: threading.Event,
    membership: Membership | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, or until asked to leave the run. Returns when everything has stopped.

    Args:
        arguments: vLLM's command line.
        stop: set by the role's handlers of these signals, which are in force before and after the engine's start.
        membership: the server's lease. None = the server announces itself to no one.

    Raises:
        LeftError: it was asked to leave, and its last request has ended.
    """
    life = Life(status, stop, membership, service)
    uvloop.run(_serve(parse_arguments(arguments), service, life))
    if life.is_leaving:
        raise LeftError("it was asked to, and its last request has ended")


async def _serve(args: Namespace, service: Service, life: "Life") -> None:
    address, sock = setup_server(args, reuse_port=False)
    try:
        with life.status.waiting("the engine's start"), signals_end_the_start(life.status, life.stop):
            client = start_engine(args)
        try:
            shutdown = await _serve_engine(client, args, sock, service, life)
        finally:
            client.shutdown(timeout=client.vllm_config.shutdown_timeout)
        await shutdown
    finally:
        sock.close()
    log.info("event=server_ended address=%s", address)


def start_engine(args: Namespace) -> AsyncLLM:
    """Start the engine's process and wait until it has loaded the model."""
    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    if config.device_config.device_type == "cpu" and config.parallel_config.world_size_across_dp == 1:
        # Everything is imported already, which is half of a CPU server's start. vLLM asks for a new interpreter because
        # of the OpenMP threads that its workers bind, and this process has none.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=_part_from_server)
    return AsyncLLM.from_vllm_config(
        config,
        usage_context=UsageContext.OPENAI_API_SERVER,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )


def _part_from_server() -> None:
    """Makes a forked engine end with the server, and keeps the engine's signals from reaching the server."""
    die_with_parent(signal.SIGKILL)
    signal.set_wakeup_fd(-1)


async def _serve_engine(client: AsyncLLM, args: Namespace, sock: Any, service: Service, life: "Life") -> Any:
    supported = await client.get_supported_tasks()
    level = logging.getLogger().level
    app = build_app(args, supported, client.model_config)
    logging.getLogger().setLevel(level)  # a dependency of vLLM's application raises it to ERROR when it is imported
    await init_app_state(client, app.state, args, supported)
    updates = None
    if service.score_temperature is not None:
        await client.collective_rpc("score_at_temperature", args=(service.score_temperature,))
    if service.averaging is not None:
        await client.collective_rpc("average_weights", args=tuple(service.averaging))
    if service.score_temperature is None or service.averaging is not None:
        if args.enable_lora:
            await client.collective_rpc("hold_adapter")
        workers = [Address(*address) for address in await client.collective_rpc("weight_address")]
        secret = os.environ.get(SECRET_VARIABLE, "")
        updates = UpdateControl(
            VllmEngine(client), workers=workers, secret=secret, on_fatal=_end_broken, announce=life.announce_weights
        )
        if service.store is not None:
            loop = asyncio.get_running_loop()
            StoreFollower(updates, loop, service.weights, url=service.store, secret=secret).start()
    _replace_routes(app, weight_update.control_router(updates))
    lean = Answers(
        client,
        model=args.served_model_name[0],
        max_model_len=client.model_config.max_model_len,
        keeps_conversations=service.vllm.prefix_caching == "conversation",
        images=ImagePrompts(client.renderer, placeholder_of(client.model_config.hf_config)),
    )
    _replace_routes(app, answers.answers_router(lean))
    asked = asyncio.Event()
    tasks = [
        asyncio.create_task(life.follow(client, asked)),
        asyncio.create_task(end_when_asked(app, asked, life.stop)),
    ]
    try:
        shutdown = await serve_http(
            app,
            sock=sock,
            host=args.host,
            port=args.port,
            log_level=args.uvicorn_log_level,
            access_log=not args.disable_uvicorn_access_log,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACEFUL_S,
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
        )
    finally:
        for task in tasks:
            task.cancel()
    if not asked.is_set():
        raise ServerEndedError("the server ended without being asked to: vLLM's engine died, its error is above")
    return shutdown


def _replace_routes(app: Any, router: Any) -> None:
    """Ours come first: vLLM's development router, which a user may turn on, has a `/weight_info` too."""
    theirs = list(app.router.routes)
    app.router.routes.clear()
    app.include_router(router)
    app.router.routes.extend(theirs)


class Life:
    """The server as others see it: heartbeat and lease."""

    def __init__(self, status: RoleStatus, stop: threading.Event, membership: Membership | None, service: Service):
        self.status, self.stop, self._membership = status, stop, membership
        first = service.first_rollouts
        self._admission = None if first is None else Admission(limit=float(first))
        self._span, self._parts = service.span, 0
        self._idle_beats = 0
        self.is_leaving = False

    def announce_weights(self, info: WeightInfo) -> None:
        """Announces at once which weights are live, and which are being fetched."""
        if self._membership is not None:
            self._membership.announce(version=info.weight_version, fetched=(info.serving, info.reading))

    async def follow(self, client: AsyncLLM, asked: asyncio.Event) -> None:
        """Reports progress as long as the engine loop answers. If the engine freezes, the lease expires."""
        reader = LoadReader(client)
        while not client.errored:
            version = await client.get_weight_version()
            requests = client.output_processor.get_num_unfinished_requests()
            self.status.progress(weight_version=version, requests=requests)
            self.status.beat_with_progress()
            if self._admission is not None:
                self._admission = self._admission.after(load := await reader.read())
                log.debug("event=admission rollouts=%d load=%s", self._admission.rollouts, load)
                if self._membership is not None:
                    self._membership.announce(capacity=self._admission.rollouts)
            if self._membership is not None:
                self.is_leaving = self.is_leaving or self._membership.is_asked_to_leave
                # Actors send no new requests to a server that drains.
                self._membership.announce(state="draining" if self.is_leaving else "ready", version=version)
            if not asked.is_set():
                self._check_parts()
            self._idle_beats = self._idle_beats + 1 if self.is_leaving and not requests else 0
            if self._idle_beats > IDLE_BEATS:
                asked.set()
            await asyncio.sleep(HEARTBEAT_S)

    def _check_parts(self) -> None:
        """End the process if a node of this server has ended: the workers that are left wait for it for ever."""
        if self._span is None or self._membership is None:
            return
        parts = count_parts(self._membership.watch.observed, self._span.address)
        if parts < self._parts:
            log.error("event=part_lost parts=%d before=%d: the server's nodes end together", parts, self._parts)
            _end_broken()
        self._parts = parts


def _end_broken() -> None:
    """The server cannot go on, and no request may see what it holds. The supervisor starts another one."""
    os._exit(FATAL_EXIT)
