"""Requests verdicts from the verifiers over the rollout's pooled HTTP session.

Each request goes to the least loaded replica. It waits as long as that replica lives, because many slow checks may come
before it. If the replica dies, the request is repeated, on the other replicas first.
"""

import asyncio
import io
import os
from collections.abc import Collection, Sequence
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.reward_functions import judge_names
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.records.verdicts import Check, Verdict, unparsable

RETRIES = 9
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
"""The delays add up to half a minute, in which a verifier that died is started again."""
TIMEOUT_S = 120.0
"""Deadline for an answer to `/health`, and the time between two such requests while a check waits for its verdict."""

IN_PROCESS = "in-process:"
"""The address of a verifier in this process. Its judges have no limits: for trials before services are up."""
JUDGE_HERE = "pipelinerl.domains.verifier.judges.judge_here"

_ENCODER = msgspec.json.Encoder()
_VERDICT = msgspec.json.Decoder(Verdict)
_clients: dict[tuple[tuple[str, ...], ...], "VerifierClient"] = {}


class RequestTooLargeError(VerifierError):
    """The service refuses the size of the request."""


PARTS = {
    "math": "pipelinerl.domains.math.judge.part_to_judge",
    "countdown": "pipelinerl.domains.countdown.judge.part_to_judge",
}
"""Judge → the function that returns the part of an output that it reads. By name: the domains import this module."""


def part_to_send(kind: str, prediction: str) -> str:
    """Returns the part of an output that its judge reads. Half of a surrogate pair becomes ``?``."""
    part = resolve_function(PARTS[kind])(prediction) if kind in PARTS else prediction
    return part.encode(errors="replace").decode()


class VerifierClient:
    """A client for a set of verifier replicas. ``client_of`` makes one per process.

    Args:
        urls: base URLs of the replicas.
        timeout_s: deadline for a sign of life of a replica.
        retries: how often a request is repeated.
        judges: `verifier.judges`, for a verifier in this process.

    Example:
        >>> client = VerifierClient(["http://127.0.0.1:8100"])
        >>> # verdict = await client.check(session, "math", "so \\boxed{42}", "42", answer_format="boxed")
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        judges: Sequence[str] = (),
    ):
        if not urls:
            raise DomainError("the domain needs a verifier: set world.verifier_replicas to 1 or more")
        self._load = dict.fromkeys((url.rstrip("/") for url in urls), 0)
        self._timeout_s = timeout_s
        self._retries = retries
        self._judges = judges
        secret = os.environ.get(SECRET_VARIABLE)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})

    async def check(
        self, session: aiohttp.ClientSession, kind: str, prediction: str, gold: Any, **options: Any
    ) -> Verdict:
        """Requests the verdict on one answer.

        Args:
            session: HTTP session of the rollout.
            kind: name of the judge: "math", "countdown", or one of `verifier.judges`.
            prediction: the model's output.
            gold: the reference, as the judge expects it.
            options: options of the judge.
        Raises:
            VerifierError: no replica answered within the retries, or the judge failed.
        """
        check = Check(kind=kind, prediction=part_to_send(kind, prediction), gold=gold, options=options)
        if IN_PROCESS in self._load:
            return judged(await asyncio.to_thread(resolve_function(JUDGE_HERE), check, self._judges))
        try:
            return judged(_VERDICT.decode(await self._post(session, "/", _ENCODER.encode(check))))
        except RequestTooLargeError:
            return unparsable("an answer larger than `verifier.max_body_kb`")

    async def _post(self, session: aiohttp.ClientSession, route: str, body: bytes) -> bytes:
        tried: set[str] = set()
        failure: Exception | None = None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S))
            url = take_address(self._load, tried)
            tried.add(url)
            if len(tried) == len(self._load):
                tried = {url}
            try:
                status, content = await self._ask(session, url, route, body)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                failure = error
                continue
            finally:
                self._load[url] -= 1
            if status == 200:
                return content
            if status == 413:
                raise RequestTooLargeError(f"{url} refuses a body of {len(body)} bytes")
            failure = VerifierError(f"{url} answered {status}: {content[:300].decode(errors='replace')}")
            if status < 500:
                raise failure
        raise VerifierError(
            f"no verifier of {list(self._load)} judged within {self._retries + 1} attempts: "
            f"{type(failure).__name__}: {failure}; see the logs of the verifier jobs"
        ) from failure

    async def _ask(self, session: aiohttp.ClientSession, url: str, route: str, body: bytes) -> tuple[int, bytes]:
        """Asks one replica and waits for its answer as long as it lives. Returns (HTTP status, content)."""
        answering = asyncio.ensure_future(self._exchange(session, url + route, body))
        sign_of_life = aiohttp.ClientTimeout(sock_connect=self._timeout_s, sock_read=self._timeout_s)
        try:
            while not (await asyncio.wait({answering}, timeout=self._timeout_s))[0]:
                async with session.get(f"{url}/health", timeout=sign_of_life) as health:
                    health.raise_for_status()
            return await answering
        finally:
            answering.cancel()

    async def _exchange(self, session: aiohttp.ClientSession, url: str, body: bytes) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(sock_connect=self._timeout_s)
        async with session.post(url, data=io.BytesIO(body), headers=self._headers, timeout=timeout) as answer:
            return answer.status, await answer.read()


def take_address(load: dict[str, int], failed: Collection[str]) -> str:
    """Returns the address with the fewest requests, and counts one more there. Others go before those that failed.

    ``load``: address → unanswered requests, least recently asked first. The first one wins a tie.
    """
    url = min(load, key=lambda one: (one in failed, load[one]))
    load[url] = load.pop(url) + 1
    return url


def judged(verdict: Verdict) -> Verdict:
    """Returns the verdict. Raises ``VerifierError`` if it is an ``error``."""
    if verdict.status == "error":
        raise VerifierError(f"the verifier could not judge: {verdict.detail}")
    return verdict


def client_of(cfg: DictConfig) -> VerifierClient:
    """Returns the client of the run's verifiers (from ``cfg.jobs``). There is one per process."""
    urls = tuple(str(job["url"]) for job in cfg.get("jobs") or () if job["kind"] == "verifier")
    judges = (*((cfg.get("verifier") or {}).get("judges") or ()), *judge_names(cfg.get("reward_function")))
    if (urls, judges) not in _clients:
        _clients[urls, judges] = VerifierClient(urls, judges=judges)
    return _clients[urls, judges]
