"""This launcher beside the other nodes' launchers: it holds a lease, reads theirs, and ends with them.

Consumes: the leases of the run's launchers, every `LOOK_S`. Produces: its own lease. Waits for: nothing, except that a
follower waits for its leader before the start. Ends: with the supervisor.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.errors import ConfigError, DeadlineError, PipelineRLError
from pipelinerl.launcher.losses import Decision
from pipelinerl.launcher.peers import (
    PeerLauncher,
    PeerPlan,
    actors_done,
    end_by_followers,
    end_by_leader,
    ending_fields,
    how_to_meet,
    is_free,
    lease_name,
    living_leader,
    refusal_of,
    see_followers,
    status_lines,
    with_vanished,
)
from pipelinerl.launcher.supervisor import Ending, PeerLaunchers, Supervisor
from pipelinerl.membership.lease import LauncherNote, Lease, Observed, observe
from pipelinerl.membership.registration import LONGEST_PAUSE_S, Registration, new_incarnation
from pipelinerl.membership.stores import TIMEOUT_S, LeaseStore, StoreAwayError, StoreRefusedError
from pipelinerl.membership.watch import LOOK_S

log = logging.getLogger(__name__)

LONGEST_LOOK_S = 2 * TIMEOUT_S
"""A look at redis takes no longer (connection and answer). The rest is time in which this launcher was frozen."""
HEARD_S = 10 * LOOK_S
"""An ending launcher waits this long until the others have read its lease."""
RIVAL_S = 3 * LONGEST_PAUSE_S
"""How long a leader watches for another one's renewals, of which a loaded machine may delay one."""


class Coordination(PeerLaunchers):
    """This launcher among the others. ``say`` prints a line for the user."""

    def __init__(self, peers: PeerPlan, store: LeaseStore, say: Callable[[str], None]):
        self._peers, self._store, self._say = peers, store, say
        self._incarnation = new_incarnation()
        self._leader = self._incarnation
        self._observed = Observed()
        self._seen: dict[int, PeerLauncher] = {}
        self._looks = 0
        self._taken = threading.Event()
        self._all_ended = asyncio.Event()
        self._registration: Registration | None = None

    async def find_no_rival(self) -> None:
        """Wait until it is certain that no other launcher leads this run. A store that is away holds none.

        Raises:
            ConfigError: another launcher leads it.
        """
        async for seen, trouble in self._meetings(RIVAL_S):
            if trouble or is_free(seen, rank=0):
                return

    async def meet(self) -> LauncherNote:
        """Wait until the leader lives and this rank is free, take this rank, and return the leader's note.

        If the leader has completed the run, the rank is not taken.

        Raises:
            ConfigError: the launchers do not fit together, or another one has this rank.
            DeadlineError: the run did not start within `launcher.startup_timeout_s`.
            PipelineRLError: the leader has ended the run.
        """
        peers, told, trouble = self._peers, False, ""
        peer = peers.name_of(0)
        self._say(f"waiting for the launcher of {peer}, whose lease comes to {peers.place}")
        async for seen, away in self._meetings(peers.startup_s):
            trouble = away
            leader = living_leader(seen)
            if leader is not None and leader[1].ending == "done":
                return leader[1]
            if leader is not None and await self._may_follow(*leader, seen):
                self._observed, self._leader = seen, leader[0].incarnation
                self.take_part(follows=self._leader)
                return leader[1]
            if leader is not None and not told:
                told = True
                self._say(f"waiting until the lease of the former {lease_name(peers.rank)} has run out")
        limit = f"launcher.startup_timeout_s={peers.startup_s:g} s"
        raise DeadlineError(
            f"{peer} did not start the run within {limit}: see its terminal; {how_to_meet(peers)}{trouble}"
        )

    async def _meetings(self, limit_s: float) -> AsyncIterator[tuple[Observed, str]]:
        """Yield the leases every `LOOK_S` until `limit_s`. The text is the store's error, if there was one."""
        seen, deadline = Observed(), time.monotonic() + limit_s
        while time.monotonic() < deadline:
            trouble = ""
            try:
                seen = observe(seen, await asyncio.to_thread(self._store.leases), time.monotonic())
            except StoreRefusedError as error:
                raise ConfigError(f"{error}: is {SECRET_VARIABLE} the same on all nodes?") from error
            except StoreAwayError as error:
                trouble = f"; {error}"
            yield seen, trouble
            await asyncio.sleep(LOOK_S)

    async def _may_follow(self, lease: Lease, note: LauncherNote, seen: Observed) -> bool:
        """Whether this launcher may start now. The leader is told if their configurations differ."""
        peers = self._peers
        if note.ending is not None:
            raise PipelineRLError(f"{peers.name_of(0)} ended the run: {note.reason or note.ending}")
        has_rank = is_free(seen, peers.rank, lease.incarnation)
        refusal = refusal_of(peers, peers.rank, note)
        if refusal is None:
            return has_rank
        if has_rank and note.secret_mark == peers.mark:
            refused = self._note(follows=lease.incarnation, ending="failed", reason=refusal)
            with contextlib.suppress(StoreAwayError):
                await asyncio.to_thread(self._store.overwrite, self._lease(refused))
        raise ConfigError(refusal)

    def take_part(self, **note: Any) -> None:
        """Begin to hold this launcher's lease. ``note``: fields of its `LauncherNote`."""
        lease = self._lease(self._note(**note))
        self._registration = Registration(self._store, lease, life=self._life, on_taken=self._taken.set)

    def _life(self) -> float:
        """A value that changes while this launcher is alive: the number of its looks at the others."""
        return self._looks or time.monotonic()  # before the first look the run folder is made ready

    def _note(self, **fields: Any) -> LauncherNote:
        return LauncherNote(digest=self._peers.digest, secret_mark=self._peers.mark, **fields)

    def _lease(self, note: LauncherNote) -> Lease:
        name, ttl_s = lease_name(self._peers.rank), self._peers.silence_s
        return Lease(name=name, incarnation=self._incarnation, ttl_s=ttl_s, state="ready", launcher=note)

    async def follow(self, supervisor: Supervisor) -> None:
        """Look at the others' leases until cancelled, and end this node's part of the run as they say."""
        away_s, last = 0.0, time.monotonic()
        while True:
            self._looks += 1
            try:
                leases = await asyncio.to_thread(self._store.leases)
                away_s = 0.0
                held = with_vanished(self._observed, leases)
                self._observed = observe(self._observed, held, time.monotonic())
            except StoreAwayError as error:
                away_s += min(time.monotonic() - last, LONGEST_LOOK_S)
                log.warning("event=launchers_not_seen seconds=%.1f reason=%s", away_s, error)
            last = time.monotonic()
            decision = self._judge(supervisor, away_s)
            if decision is not None:
                supervisor.carry_out(decision)
            await asyncio.sleep(LOOK_S)

    def _judge(self, supervisor: Supervisor, away_s: float) -> Decision | None:
        """Return how this node's part of the run ends. None: it goes on."""
        peers, observed = self._peers, self._observed
        if self._taken.is_set():
            return Decision(action="end", reason=f"another launcher with RANK={peers.rank} has taken this one's place")
        if peers.rank:
            return end_by_leader(peers, self._leader, observed, away_s)
        before, self._seen = self._seen, see_followers(peers, self._leader, observed, self._seen)
        if any(follower.state == "here" for follower in self._seen.values()):
            self._all_ended.clear()
        else:
            self._all_ended.set()
        for line in status_lines(peers, before, self._seen):
            self._say(line)
        for name in actors_done(self._leader, (sighting.lease for sighting in observed.sightings.values())):
            supervisor.actor_done(name)
        return end_by_followers(peers, self._seen, observed.clock_s)

    async def tell_actor_done(self, name: str) -> None:
        self._update(lambda note: {"actors_done": (*note.actors_done, name)})

    async def tell_end(self, ending: Ending) -> None:
        """Write the ending into the lease. The leader waits until its followers have read it: its redis ends next."""
        if self._registration is None:
            return
        deadline = time.monotonic() + HEARD_S
        self._update(lambda _: ending_fields(ending))
        await asyncio.to_thread(self._registration.wait_until_written, HEARD_S)
        if self._peers.rank == 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), max(deadline - time.monotonic(), 0.0))

    async def tell_failure(self, error: Exception) -> None:
        """Tell the others that this node ends because of an error of the launcher itself."""
        if self._registration is not None and (note := self._registration.lease.launcher) and note.ending is None:
            await self.tell_end(Ending(kind="failed", reason=str(error)))

    def _update(self, change: Callable[[LauncherNote], Mapping[str, Any]]) -> None:
        """Change fields of the note in this launcher's lease."""
        assert self._registration is not None, "take_part() comes first"
        note = self._registration.lease.launcher
        assert note is not None, "it was made with one"
        self._registration.update(launcher=msgspec.structs.replace(note, **change(note)))

    def close(self) -> None:
        """Stop renewing the lease. It stays, so that the others read how this launcher has ended."""
        if self._registration is not None:
            self._registration.close(removes=False)
