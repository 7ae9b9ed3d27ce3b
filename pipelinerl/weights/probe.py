"""The probe's text: tokens that a server of the run sampled from the model's file, and the trainer's scores of them.

Sampled tokens are likely tokens, whose log-probabilities differ least between healthy kernels. The text and its scores
at version 0 are stored in the run folder, so that a late or restarted server can be calibrated before its first update.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pipelinerl.host.disk import replacement

NUM_TOKENS = 1024
MAX_LENGTH = 256
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
