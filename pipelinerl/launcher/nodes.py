"""Launchers of several nodes act as one: they meet, start together, and tell each other how they ended.

Node 0 leads and listens on one port. Every other launcher opens one connection to it. It proves by HMAC over a fresh
challenge that it knows `PIPELINERL_SECRET` and has the same configuration and world. Lines of JSON follow: `alive` at
least four times per `launcher.node_timeout_s`, `actor_done` and `end`. If a connection closes without `end` or is
silent for `node_timeout_s`, its node counts as lost and the run ends on all nodes.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.errors import ConfigError, DeadlineError, PipelineRLError
from pipelinerl.launcher.supervisor import Ending, Others, Supervisor
from pipelinerl.world import WorldMap
from pipelinerl.world.network import listen_address

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 65536
CONNECT_RETRY_S = 0.5
HANDSHAKE_TIMEOUT_S = 10.0
BEATS_PER_TIMEOUT = 4


class NodeLostError(PipelineRLError):
    """Another launcher of the run disappeared or ended the run. The message names it and the reason."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where the launchers meet, their secret, and the settings on which they must agree."""

    host: str
    port: int
    num_nodes: int
    rank: int
    secret: str
    fingerprint: str
    """Digest of configuration and world."""
    meet_timeout_s: float
    node_timeout_s: float


def plan_rendezvous(
    world: WorldMap, rank: int, container: Mapping[str, Any], env: Mapping[str, str], *, startup_s: float, node_s: float
) -> Rendezvous:
    """Plan the meeting of the launchers of this world.

    Args:
        rank: node rank of this launcher.
        container: the configuration. All launchers must have the same one, except for `output_dir`.
        env: environment with the shared secret of at least 16 characters.
        startup_s: how long to wait for the other launchers.
        node_s: silence after which a node counts as lost.

    Raises:
        ConfigError: the secret is missing or too short.
    """
    secret = env.get(SECRET_VARIABLE, "")
    if len(secret) < 16:
        raise ConfigError(
            f"the world has {len(world.nodes)} nodes but {SECRET_VARIABLE} is not set: give all launchers the same "
            "random string of at least 16 characters, e.g. from `openssl rand -hex 32`"
        )
    settings = {key: value for key, value in container.items() if key != "output_dir"}
    document = json.dumps(settings, sort_keys=True, default=str) + world.digest()
    return Rendezvous(
        host=world.nodes[0].hostname,
        port=world.launcher_port,
        num_nodes=len(world.nodes),
        rank=rank,
        secret=secret,
        fingerprint=hashlib.sha256(document.encode()).hexdigest(),
        meet_timeout_s=startup_s,
        node_timeout_s=node_s,
    )


class NodeConnection(Others):
    """This launcher's connection to the others."""

    async def follow(self, supervisor: Supervisor) -> None:
        """Pass messages of the other launchers to the supervisor until cancelled."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the connection."""
        raise NotImplementedError


class Wire:
    """One connection that carries lines of JSON. `receive` raises `NodeLostError` after too long a silence."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str):
        self._reader, self._writer, self.peer = reader, writer, peer

    async def send(self, **message: Any) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(json.dumps(message).encode() + b"\n")
            await self._writer.drain()

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = await asyncio.wait_for(self._reader.readline(), timeout_s)
            message = json.loads(line) if line else None
        except TimeoutError:
            raise NodeLostError(f"{self.peer} has been silent for {timeout_s:g} s (launcher.node_timeout_s)") from None
        except (ConnectionError, ValueError) as error:
            raise NodeLostError(f"the connection to {self.peer} broke: {error}") from error
        if not isinstance(message, dict):
            raise NodeLostError(f"{self.peer} closed its connection")
        return message

    async def beat(self, interval_s: float) -> None:
        """Send `alive` every `interval_s` until cancelled."""
        while True:
            await self.send(kind="alive")
            await asyncio.sleep(interval_s)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(self._writer.wait_closed(), 2)


def answer_of(rendezvous: Rendezvous, challenge: str, rank: int) -> str:
    text = f"{challenge}/{rank}/{rendezvous.fingerprint}"
    return hmac.new(rendezvous.secret.encode(), text.encode(), hashlib.sha256).hexdigest()


class Leader(NodeConnection):
    """Node 0. It waits for all other launchers, tells them to start, and tells all of them when the run ends."""

    def __init__(self, rendezvous: Rendezvous, hosts: tuple[str, ...]):
        self._rendezvous, self._hosts = rendezvous, hosts
        self._wires: dict[int, Wire] = {}
        self._server: asyncio.Server | None = None
        self._complete = asyncio.Event()
        self._refusal: str | None = None

    async def meet(self, say: Callable[[str], None], start: Mapping[str, Any]) -> None:
        """Wait for every node and send it the message `start`.

        Raises:
            DeadlineError: a node did not connect within `launcher.startup_timeout_s`.
            ConfigError: a node has another configuration or world.
        """
        self._server = await asyncio.start_server(
            self._welcome, listen_address(self._rendezvous.host) or None, self._rendezvous.port, limit=MAX_LINE_BYTES
        )
        say(f"waiting for {self._rendezvous.num_nodes - 1} more launcher(s) on port {self._rendezvous.port}")
        try:
            await asyncio.wait_for(self._complete.wait(), self._rendezvous.meet_timeout_s)
        except TimeoutError:
            missing = [self._hosts[r] for r in range(1, self._rendezvous.num_nodes) if r not in self._wires]
            raise DeadlineError(
                f"no launcher from {', '.join(missing)} within launcher.startup_timeout_s="
                f"{self._rendezvous.meet_timeout_s:g} s: start the same command there with RANK set"
            ) from None
        if self._refusal:
            raise ConfigError(self._refusal)
        for wire in self._wires.values():
            await wire.send(kind="start", **start)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Check a new connection. It is closed without an answer if its launcher does not know the secret."""
        wire = Wire(reader, writer, "a launcher")
        challenge = secrets.token_hex(16)
        await wire.send(kind="challenge", challenge=challenge)
        try:
            hello = await wire.receive(HANDSHAKE_TIMEOUT_S)
            rank = int(hello["rank"])
            known = hmac.compare_digest(str(hello["proof"]), proof_of_secret(self._rendezvous, challenge))
            agreed = hmac.compare_digest(str(hello["answer"]), answer_of(self._rendezvous, challenge, rank))
        except (NodeLostError, KeyError, ValueError, TypeError):
            known = False
        if not known or not 0 < rank < self._rendezvous.num_nodes or rank in self._wires:
            log.warning("event=connection_refused")
            await wire.close()
            return
        wire.peer = f"node {rank} ({self._hosts[rank]})"
        self._wires[rank] = wire
        if not agreed:
            self._refusal = (
                f"{wire.peer} was started with another configuration or world: start the same command on all nodes"
            )
            await wire.send(kind="end", ending="failed", reason=self._refusal)
        if self._refusal or len(self._wires) == self._rendezvous.num_nodes - 1:
            self._complete.set()

    async def follow(self, supervisor: Supervisor) -> None:
        """Consume the messages of all nodes. The first loss or failure ends the run."""
        interval = self._rendezvous.node_timeout_s / BEATS_PER_TIMEOUT
        async with asyncio.TaskGroup() as group:
            for wire in self._wires.values():
                group.create_task(wire.beat(interval))
                group.create_task(self._listen(wire, supervisor))

    async def _listen(self, wire: Wire, supervisor: Supervisor) -> None:
        while True:
            try:
                message = await wire.receive(self._rendezvous.node_timeout_s)
            except NodeLostError as error:
                supervisor.fail(str(error), is_cut_off=True)
                return
            if message["kind"] == "actor_done":
                supervisor.actor_done(str(message["name"]))
            elif message["kind"] == "end":
                tell_supervisor(supervisor, message, wire.peer)
                return

    async def tell_actor_done(self, name: str) -> None:
        """Do nothing: the leader's own supervisor counts its actors itself."""

    async def tell_end(self, ending: Ending) -> None:
        for wire in self._wires.values():
            await wire.send(kind="end", **ending_fields(ending))

    async def close(self) -> None:
        for wire in self._wires.values():
            await wire.close()
        if self._server:
            self._server.close()


class Follower(NodeConnection):
    """Every other node. It connects to the leader, starts when the leader says so, and ends when the leader ends."""

    def __init__(self, rendezvous: Rendezvous):
        self._rendezvous = rendezvous
        self._wire: Wire | None = None

    @property
    def wire(self) -> Wire:
        assert self._wire is not None, "meet() comes first"
        return self._wire

    async def meet(self, say: Callable[[str], None]) -> dict[str, Any]:
        """Connect to the leader and return its start message.

        Raises:
            DeadlineError: the leader did not start the run within `launcher.startup_timeout_s`.
            NodeLostError: the leader closed the connection or ended the run.
        """
        rendezvous = self._rendezvous
        leader = f"node 0 ({rendezvous.host}:{rendezvous.port})"
        say(f"waiting for the launcher of {leader}")
        try:
            async with asyncio.timeout(rendezvous.meet_timeout_s):
                self._wire = await self._connect(leader)
                challenge = str((await self._wire.receive(HANDSHAKE_TIMEOUT_S))["challenge"])
                await self._wire.send(
                    kind="hello",
                    rank=rendezvous.rank,
                    proof=proof_of_secret(rendezvous, challenge),
                    answer=answer_of(rendezvous, challenge, rendezvous.rank),
                )
                message = await self._wire.receive(rendezvous.meet_timeout_s)
        except TimeoutError:
            limit = f"launcher.startup_timeout_s={rendezvous.meet_timeout_s:g} s"
            raise DeadlineError(f"{leader} did not start the run within {limit}: see its terminal") from None
        except NodeLostError as error:
            raise NodeLostError(f"{error}: is {SECRET_VARIABLE} the same on all nodes?") from error
        if message["kind"] == "end":
            raise NodeLostError(f"{leader} ended the run: {message.get('reason')}")
        return message

    async def _connect(self, leader: str) -> Wire:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(
                    self._rendezvous.host, self._rendezvous.port, limit=MAX_LINE_BYTES
                )
                return Wire(reader, writer, leader)
            await asyncio.sleep(CONNECT_RETRY_S)

    async def follow(self, supervisor: Supervisor) -> None:
        """Consume the leader's messages. If the leader is lost, this node's part of the run fails."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.wire.beat(self._rendezvous.node_timeout_s / BEATS_PER_TIMEOUT))
            group.create_task(self._listen(supervisor))

    async def _listen(self, supervisor: Supervisor) -> None:
        while True:
            try:
                message = await self.wire.receive(self._rendezvous.node_timeout_s)
            except NodeLostError as error:
                supervisor.fail(str(error), is_cut_off=True)
                return
            if message["kind"] == "end":
                tell_supervisor(supervisor, message, self.wire.peer)
                return

    async def tell_actor_done(self, name: str) -> None:
        await self.wire.send(kind="actor_done", name=name)

    async def tell_end(self, ending: Ending) -> None:
        await self.wire.send(kind="end", **ending_fields(ending))

    async def close(self) -> None:
        if self._wire:
            await self._wire.close()


def proof_of_secret(rendezvous: Rendezvous, challenge: str) -> str:
    return hmac.new(rendezvous.secret.encode(), challenge.encode(), hashlib.sha256).hexdigest()


def ending_fields(ending: Ending) -> dict[str, str]:
    """Return an ending as the fields of an `end` message."""
    text = ending.reason if ending.failure is None else str(ending.failure)
    return {"ending": ending.kind, "reason": text}


def tell_supervisor(supervisor: Supervisor, message: Mapping[str, Any], peer: str) -> None:
    """End this node's part of the run in the same way as the other node's `end` message says."""
    match message.get("ending"):
        case "done":
            supervisor.finish()
        case "stopped":
            supervisor.request_stop(str(message.get("reason")))
        case _:
            supervisor.fail(f"{peer}: {message.get('reason')}")
