"""Asks verifiers for verdicts over the rollout's pooled HTTP session; the least loaded replica first, in turn.

A replica that does not answer is tried again, and the others with it; an ``error`` verdict and a service that stays
away are a ``VerifierError``. Neither is ever a reward.
"""

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from omegaconf import DictConfig

from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.errors import DomainError, VerifierError
from pipelinerl.records.verdicts import BatchVerdicts, Check, CheckBatch, Verdict

RETRIES = 9
FIRST_DELAY_S, LONGEST_DELAY_S = 0.2, 5.0
"""Together half a minute: a verifier that died is back by then."""
TIMEOUT_S = 120.0
"""Deadline of one request: waiting for a worker included."""

_ENCODER = msgspec.json.Encoder()
_VERDICT = msgspec.json.Decoder(Verdict)
_VERDICTS = msgspec.json.Decoder(BatchVerdicts)
_clients: dict[tuple[str, ...], "VerifierClient"] = {}


class VerifierClient:
    """One per process and set of replicas; see ``client_of``.

    Example:
        >>> client = VerifierClient(["http://127.0.0.1:8100"])
        >>> # verdict = await client.check(session, "math", "so \\boxed{42}", "42", answer_format="boxed")
    """

    def __init__(self, urls: Sequence[str], *, timeout_s: float = TIMEOUT_S, retries: int = RETRIES):
        if not urls:
            raise DomainError("the domain needs a verifier: set world.verifier_replicas to 1 or more")
        self._load = dict.fromkeys((url.rstrip("/") for url in urls), 0)
        """Requests under way; among equals the replica asked longest ago comes first."""
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._retries = retries
        secret = os.environ.get(SECRET_VARIABLE)
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {secret}"} if secret else {})

    async def check(
        self, session: aiohttp.ClientSession, kind: str, prediction: str, gold: Any, **options: Any
    ) -> Verdict:
        """The verdict on one answer.

        Raises:
            VerifierError: no replica answered within the retries, or the judge could not do its work.
        """
        body = _ENCODER.encode(Check(kind=kind, prediction=prediction, gold=gold, options=options))
        return judged(_VERDICT.decode(await self._post(session, "/", body)))

    async def check_all(self, session: aiohttp.ClientSession, checks: Sequence[Check]) -> list[Verdict]:
        """Verdicts in the order of the checks, ``error`` ones included: the caller decides what they cost."""
        if not checks:
            return []
        answer = await self._post(session, "/batch", _ENCODER.encode(CheckBatch(checks=list(checks))))
        return _VERDICTS.decode(answer).verdicts

    async def _post(self, session: aiohttp.ClientSession, route: str, body: bytes) -> bytes:
        tried: set[str] = set()
        failure: Exception | None = None
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(FIRST_DELAY_S * 2 ** (attempt - 1), LONGEST_DELAY_S))
            url = min(self._load, key=lambda url: (url in tried, self._load[url]))
            tried.add(url)
            if len(tried) == len(self._load):
                tried = {url}
            self._load[url] = self._load.pop(url) + 1
            try:
                async with session.post(url + route, data=body, headers=self._headers, timeout=self._timeout) as answer:
                    content = await answer.read()
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                failure = error
                continue
            finally:
                self._load[url] -= 1
            if answer.status == 200:
                return content
            failure = VerifierError(f"{url} answered {answer.status}: {content[:300].decode(errors='replace')}")
            if answer.status < 500:
                raise failure
        raise VerifierError(
            f"no verifier of {list(self._load)} judged within {self._retries + 1} attempts: "
            f"{type(failure).__name__}: {failure}; see the logs of the verifier jobs"
        ) from failure


def judged(verdict: Verdict) -> Verdict:
    """The verdict, unless it is an ``error``, which is raised."""
    if verdict.status == "error":
        raise VerifierError(f"the verifier could not judge: {verdict.detail}")
    return verdict


def client_of(cfg: DictConfig) -> VerifierClient:
    """The client of the run's verifiers (``cfg.jobs``), one per process."""
    urls = tuple(str(job["url"]) for job in cfg.get("jobs") or () if job["kind"] == "verifier")
    if urls not in _clients:
        _clients[urls] = VerifierClient(urls)
    return _clients[urls]
