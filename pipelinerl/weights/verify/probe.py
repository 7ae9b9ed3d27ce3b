"""The weight probe: its text, and its two questions over HTTP: are these the sent bytes, how likely is this text.

The text is tokens that a server of the run sampled from the model's file: log-probabilities of likely tokens differ
least between healthy kernels.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec
import numpy as np

from pipelinerl.errors import TransportError
from pipelinerl.weights.protocol import CHECK_PATH, WeightCheck, WeightCheckRequest
from pipelinerl.weights.verify.scores import SCORE_PATH
from pipelinerl.world import Job
from pipelinerl.world.disk import replacement
from pipelinerl.world.proxies import own_client

NUM_TOKENS = 1024
"""Tokens of the text, at least: enough to see an update in the noise of two kernels, few enough to score often."""
MAX_LENGTH = 256
"""Longest sequence of the text: an answer between two fast updates still scores a whole one."""
FIRST_TIMEOUT_S = 1800.0
"""For an answer of a server that has none of the trainer's weights yet. It computes a whole text, perhaps with more
roles than cores on its machine. A server that hangs is ended by its launcher."""
FILE = "weights/probe.npz"
"""In the run folder."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeText:
    """S sequences of L tokens."""

    token_ids: np.ndarray
    """int32 [S, L]. The first token of each sequence is not scored."""
    logprobs: np.ndarray | None = None
    """float32 [S·(L−1)]: the trainer's scores at version 0. None = this text was made at a later version."""

    def with_scores(self, logprobs: np.ndarray) -> "ProbeText":
        return replace(self, logprobs=logprobs)

    def save(self, run_dir: Path) -> None:
        """Writes the text to the run folder and replaces an earlier one."""
        path = run_dir / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacement(path, sync=True) as file:
            if self.logprobs is None:
                np.savez(file, token_ids=self.token_ids)
            else:
                np.savez(file, token_ids=self.token_ids, logprobs=self.logprobs)

    @classmethod
    def load(cls, run_dir: Path) -> "ProbeText | None":
        """Loads the run's text. Returns None if there is none yet."""
        path = run_dir / FILE
        if not path.exists():
            return None
        with np.load(path, allow_pickle=False) as arrays:
            return cls(token_ids=arrays["token_ids"], logprobs=arrays.get("logprobs"))


def text_shape(max_model_len: int) -> tuple[int, int]:
    """Returns (sequences, tokens of each) for servers with ``max_model_len``. Scoring asks for one more token."""
    length = max(2, min(MAX_LENGTH, max_model_len - 1))
    return -(-NUM_TOKENS // length), length


def first_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Draws the first tokens of ``count`` sequences at random, so that the sampled texts differ."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, size=count)]


_checks = msgspec.json.Decoder(WeightCheck)
"""Made once, at the import: a process died with two threads in msgspec, each at its first look at a type."""


class ProbeClient:
    """Asks one server. Blocks until it has answered.

    Methods raise ``httpx.HTTPError``, ``TransportError``, or what decoding an answer raises.
    """

    def __init__(self, job: Job, *, secret: str, timeout_s: float):
        self.name = job.name
        headers = {"Authorization": f"Bearer {secret}"}
        self._client = httpx.Client(base_url=job.url, headers=headers, timeout=timeout_s, **own_client())

    def compare(self, version: int) -> WeightCheck:
        """Has the server compare its live tensors with the bytes of the version."""
        body = msgspec.json.encode(WeightCheckRequest(version=version))
        response = self._client.post(CHECK_PATH, content=body, headers={"Content-Type": "application/json"})
        return _checks.decode(_content(response))

    def score(self, request: dict, timeout_s: float | None = None) -> bytes:
        """Returns the answer to a request of `scores`. ``timeout_s``: instead of the client's."""
        limit = self._client.timeout if timeout_s is None else timeout_s
        return _content(self._client.post(SCORE_PATH, json=request, timeout=limit))

    def close(self) -> None:
        self._client.close()


def _content(response: httpx.Response) -> bytes:
    if response.status_code != 200:
        raise TransportError(f"{response.url.path} answered {response.status_code}: {response.text[:200]}")
    return response.content
