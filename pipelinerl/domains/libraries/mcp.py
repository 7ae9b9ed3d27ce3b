"""Servers of the Model Context Protocol as tools, over standard input and output (a process) or HTTP.

Every rollout has sessions of its own. Problems are recorded, so they only name their servers; the configuration holds
their commands and keys. The policy reads a tool's answer, and also its refusal of a call. A server that fails or does
not answer ends the rollout with an error.
"""

import errno
import functools
import json
import logging
import os
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, TextIO

import aiohttp
from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.environment import ROLE_VARIABLE, RUN_VARIABLE
from pipelinerl.domains.columns import checked_columns
from pipelinerl.domains.datasets import rows_of
from pipelinerl.domains.libraries import address_of, library, served
from pipelinerl.domains.libraries.tools import DEFAULT_MAX_TURNS, MAX_RESULT_CHARS, answer_with_tools, judge
from pipelinerl.domains.math.dataset import problem_of
from pipelinerl.domains.rows import MAX_LEFT_OUT, load_usable
from pipelinerl.errors import DomainError, PipelineRLError, TransportError
from pipelinerl.llm import ToolCall, TrainableLLM
from pipelinerl.observability.logging import redacted
from pipelinerl.rollouts import RolloutResult
from pipelinerl.world.process import kept

log = logging.getLogger(__name__)

mcp = library("mcp", "mcp")
http = library("httpx2", "mcp")
streams = library("mcp.client.streamable_http", "mcp")
types = library("mcp.types", "mcp")

TIMEOUT_S = 60.0
"""Default of `timeout_s`: a search on the web fits."""
MAX_LINE_CHARS = 2000
"""Longer lines of a program's error output are split, so that an endless one does not fill the memory."""
PATIENCE_S = 1.0
"""Seconds from SIGTERM to SIGKILL of a server's process. Less than the 2 s after which the SDK kills its keeper."""
MAX_PAGES, MAX_LISTED_CHARS = 100, 2**20
"""Limits of a server's list of tools. Every prompt holds the whole list, so a longer one would not fit a context."""
REFUSALS = (types.INVALID_PARAMS, types.METHOD_NOT_FOUND)
"""Error codes that a wrong call causes. All others are failures of the server."""

required_problem_keys = ("task", "answer", "servers")


def load_problems(
    dataset_names: list[str],
    servers: dict[str, dict[str, Any]],
    columns: dict[str, str] | None = None,
    max_turns: int = DEFAULT_MAX_TURNS,
    timeout_s: float = TIMEOUT_S,
    judge: str | None = None,
    max_left_out: float = MAX_LEFT_OUT,
) -> list[dict[str, Any]]:
    """Reads problems with an answer, and gives each the names of the servers.

    Args:
        dataset_names: see ``pipelinerl.domains.datasets``.
        servers: name → ``{"command": …, "args": […], "env": {…}}`` for one process per rollout, or
            ``{"url": …, "headers": {…}}``, where the URL may be the key of one of the run's ``environments``.
        columns: field → column: ``{"task": …, "answer": …}``.
        max_turns: maximum number of LLM calls in a rollout.
        timeout_s: longest wait for an answer of a server, in seconds.
        judge: dotted name of a function (the policy's last message, the problem's answer) → ``Verdict``. By default the
            answer in ``<answer>…</answer>`` is compared.
        max_left_out: largest share of a data set's rows that may lack a question or an answer. They are left out.
    """
    named = checked_columns(columns, ("task", "answer"))
    rules = {"servers": list(servers), "max_turns": max_turns, "timeout_s": timeout_s, "judge": judge}

    def read(row: dict[str, Any], index: int) -> dict[str, Any]:
        return problem_of(row, named) | {"id": index} | rules

    return [
        {"dataset": name} | problem
        for name in dataset_names
        for problem in load_usable(name, rows_of(name, True), read, max_left_out=max_left_out)
    ]


class McpServer:
    """An entry of ``environments`` that serves tools over HTTP as part of the run.

    Args:
        server: ``package.module:name`` of an ``mcp.server.mcpserver.MCPServer``.
    """

    def __init__(self, server: str):
        self._server = server

    def launch(self, port: int, host: str = "127.0.0.1") -> None:
        """Serves until the process is told to stop."""
        served(self._server, "server").run("streamable-http", host=host, port=port)


class Tools:
    """The tools of connected servers. ``clients``: name of a server → its connected client."""

    def __init__(self, clients: dict[str, Any]):
        self._clients = clients
        self._owners: dict[str, str] = {}
        self.descriptions: list[dict[str, Any]] = []
        """In OpenAI's format."""

    async def list(self) -> None:
        """Lists the tools of all servers. Tools beyond the limits of a list are left out.

        Raises:
            DomainError: two tools have the same name.
        """
        for server, client in self._clients.items():
            cursor, left = None, MAX_LISTED_CHARS
            for _ in range(MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    description = describe(tool)
                    left -= len(json.dumps(description))
                    if left >= 0:
                        self._add(server, tool.name, description)
                cursor = page.next_cursor
                if not cursor or left < 0:
                    break
            if cursor or left < 0:
                warn_cut(server)

    def _add(self, server: str, name: str, description: dict[str, Any]) -> None:
        if name in self._owners:
            raise DomainError(f"servers {self._owners[name]!r} and {server!r} have a tool {name!r}")
        self._owners[name] = server
        self.descriptions.append(description)

    async def call(self, call: ToolCall) -> str:
        """Calls a tool and returns the text for the policy. Raises ``TransportError`` if the server fails."""
        name = call.function.name
        if name not in self._owners:
            return f"error: there is no tool {name[:50]!r}"
        try:
            arguments = json.loads(call.function.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            return "error: the arguments are no JSON object"
        server = self._owners[name]
        with failing(f"the MCP server {server!r}"):
            try:
                result = await self._clients[server].call_tool(name, arguments)
            except mcp.MCPError as error:
                if error.code not in REFUSALS:
                    raise
                return redacted(f"error: {error}")[:MAX_RESULT_CHARS]
        return redacted(("error: " if result.is_error else "") + as_text(result))[:MAX_RESULT_CHARS]


@asynccontextmanager
async def open_tools(
    cfg: DictConfig, servers: dict[str, dict[str, Any]], *, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[Tools]:
    """Connects to servers and lists their tools. Processes end with the block.

    Args:
        cfg: the run's configuration, with the addresses of its ``environments``.
        servers: see ``load_problems``, with values in place of references.
        timeout_s: longest wait for an answer, in seconds.
    Raises:
        TransportError: a server cannot be reached or failed.
        DomainError: a program does not exist.
    """
    with failing(f"an MCP server of {sorted(servers)}"):
        async with AsyncExitStack() as stack:
            clients = {}
            for name, server in servers.items():
                client = mcp.Client(await transport_of(cfg, name, server, stack), read_timeout_seconds=timeout_s)
                clients[name] = await stack.enter_async_context(client)
            tools = Tools(clients)
            await tools.list()
            yield tools


async def transport_of(cfg: DictConfig, name: str, server: dict[str, Any], stack: AsyncExitStack) -> Any:
    """Returns the transport for ``mcp.Client``. Its HTTP client is closed with the stack."""
    if "url" in server:
        address = address_of(cfg, server["url"], own_path="/mcp")
        client = await stack.enter_async_context(http.AsyncClient(headers=server.get("headers"), timeout=None))
        return streams.streamable_http_client(address, http_client=client)
    return mcp.stdio_client(kept_server(mcp.StdioServerParameters(**server)), errlog=stack.enter_context(logged(name)))


@contextmanager
def logged(server: str) -> Iterator[TextIO]:
    """Yields a file whose lines become events of this process's log, which redacts secrets."""
    read, write = os.pipe()

    def log_lines() -> None:
        with open(read, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(MAX_LINE_CHARS):
                log.info("event=mcp_server_said server=%s line=%s", server, line.rstrip())

    threading.Thread(target=log_lines, name=f"{server}'s errors", daemon=True).start()
    with open(write, "w", encoding="utf-8") as file:
        yield file


def servers_of(cfg: DictConfig, names: list[str]) -> dict[str, dict[str, Any]]:
    """Returns the servers of these names from the configuration.

    Raises:
        DomainError: a server is not configured, or two domains have different ones of this name.
    """
    places = [cfg, *(cfg.get("domains") or ())]
    tables = [OmegaConf.select(place, "dataset_loader_params.servers") or {} for place in places]
    found: dict[str, Any] = {}
    for name in names:
        given = [OmegaConf.to_container(table[name], resolve=True) for table in tables if name in table]
        if not given:
            raise DomainError(f"`dataset_loader_params.servers` of the configuration has no server {name!r}")
        if any(server != given[0] for server in given):
            raise DomainError(f"two of `domains` have different servers {name!r}: give them different names")
        found[name] = given[0]
    return found


def kept_server(given: Any) -> Any:
    """Returns parameters with which a server's process, and all that it starts, ends with its rollout.

    Raises:
        FileNotFoundError: the program does not exist.
    """
    marks = {name: os.environ[name] for name in (RUN_VARIABLE, ROLE_VARIABLE) if name in os.environ}
    variables = marks | (given.env or {})
    place = os.path.join(given.cwd or "", given.command) if os.path.dirname(given.command) else given.command
    if shutil.which(place, path=variables.get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), given.command)
    command, *arguments = kept([given.command, *given.args], PATIENCE_S)
    return given.model_copy(update={"command": command, "args": arguments, "env": variables})


@functools.cache
def warn_cut(server: str) -> None:
    """Warns, once per server, that not all of its tools are used."""
    limits = (MAX_PAGES, MAX_LISTED_CHARS)
    log.warning("event=tools_left_out server=%s limit_pages=%d limit_chars=%d: the later ones", server, *limits)


@contextmanager
def failing(peer: str) -> Iterator[None]:
    """Turns errors of servers and connections, which the SDK raises in groups, into ``TransportError``."""
    try:
        yield
    except (Exception, BaseExceptionGroup) as raised:
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, FileNotFoundError):
            raise DomainError(f"{peer}: there is no such program: {error.filename}") from raised
        if isinstance(error, (mcp.MCPError, http.HTTPError, OSError)):
            raise TransportError(f"{peer} did not answer: {type(error).__name__}: {error}") from raised
        raise error from (None if error is raised or isinstance(error, PipelineRLError) else raised)


def describe(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def as_text(result: Any) -> str:
    """Returns the texts of a result, else its structured content. Other parts become ``[their type]``."""
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    if not texts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(texts)


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Runs one rollout: the policy calls tools until it answers without one."""
    async with open_tools(cfg, servers_of(cfg, problem["servers"]), timeout_s=problem["timeout_s"]) as tools:
        return await answer_with_tools(
            cfg,
            llm,
            problem,
            session,
            tools=tools.descriptions,
            call_tool=tools.call,
            max_turns=problem["max_turns"],
            judge=resolve_function(problem["judge"]) if problem["judge"] else judge,
        )
