"""The two questions of the weight probe, over HTTP: are these the bytes that were sent, and how likely is this text."""

import httpx
import msgspec

from pipelinerl.errors import TransportError
from pipelinerl.weights.protocol import CHECK_PATH, WeightCheck, WeightCheckRequest
from pipelinerl.weights.scores import SCORE_PATH
from pipelinerl.world import Job
from pipelinerl.world.tls import client_context

_checks = msgspec.json.Decoder(WeightCheck)
"""Made once, at the import: a process died with two threads in msgspec, each at its first look at a type."""


class ProbeClient:
    """Asks one server. Blocks until it has answered.

    Methods raise ``httpx.HTTPError``, ``TransportError``, or ``msgspec.DecodeError``.
    """

    def __init__(self, job: Job, *, secret: str, timeout_s: float):
        self.name = job.name
        headers = {"Authorization": f"Bearer {secret}"}
        self._client = httpx.Client(base_url=job.url, headers=headers, timeout=timeout_s, verify=client_context())

    def compare(self, version: int) -> WeightCheck:
        """Has the server compare its live tensors with the bytes of the version."""
        body = msgspec.json.encode(WeightCheckRequest(version=version))
        response = self._client.post(CHECK_PATH, content=body, headers={"Content-Type": "application/json"})
        return _checks.decode(_content(response))

    def score(self, request: dict) -> bytes:
        """Returns the answer to a request of `scores`."""
        return _content(self._client.post(SCORE_PATH, json=request))

    def close(self) -> None:
        self._client.close()


def _content(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise TransportError(f"{response.url.path} answered {response.status_code}: {response.text[:200]}")
    return response.content
