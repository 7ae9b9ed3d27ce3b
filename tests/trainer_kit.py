"""The trainer's surroundings in tests: the one fake of its sender, and the context of its role without a launcher."""

import contextlib
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from pipelinerl.config.sections import Config
from pipelinerl.observability.role import RoleContext
from pipelinerl.weights.attestor import Miss
from pipelinerl.weights.probe import ProbeText
from pipelinerl.world import Job

SERVER = "actor_llm_0"


class FakeSender:
    """`finetune.publish.Sender` with one server that takes every update once the test lets it."""

    is_exhausted = False

    def __init__(self, *, keeps_weights: bool = True, wants_scores: bool = True) -> None:
        """``keeps_weights``: remember the tensors of every version, else only read them."""
        self.keeps_weights, self.wants_scores = keeps_weights, wants_scores
        self.let = threading.Event()
        """A push ends while this is set, as it is at first."""
        self.let.set()
        self.received: list[tuple[int, dict[str, Tensor]]] = []
        self.scores: list[Future[np.ndarray] | None] = []
        self.text: ProbeText | None = None
        self.returning: tuple[str, ...] = (SERVER,)
        self.readmitted = 0
        self.misses: list[Miss] = []
        self._pushed: int | None = None

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int) -> ProbeText:
        tokens = np.random.default_rng(seed).integers(0, vocab_size, shape)
        return ProbeText(token_ids=tokens.astype(np.int32))

    def attest_with(self, text: ProbeText) -> None:
        self.text = text

    def take_misses(self) -> list[Miss]:
        misses, self.misses = self.misses, []
        return misses

    def send_async(
        self,
        version: int,
        params: Iterable[tuple[str, Tensor]],
        metadata: Sequence[Any],
        scores: "Future[np.ndarray] | None" = None,
    ) -> None:
        specs, taken = iter(metadata), {}
        for name, tensor in params:
            spec = next(specs)
            expected = (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            assert (spec.name, spec.dtype, spec.shape) == expected
            if self.keeps_weights:
                taken[name] = tensor.clone()
        assert next(specs, None) is None, "more parameters were announced than sent"
        self.received.append((version, taken))
        self.scores.append(scores)
        self.returning = ()
        self._pushed = version

    def readmit_async(self) -> bool:
        if not self.returning or not self.received:
            return False
        self.readmitted += 1
        self.returning = ()
        self._pushed = self.received[-1][0]
        return True

    @property
    def is_pushing(self) -> bool:
        return self._pushed is not None

    @property
    def is_done(self) -> bool:
        return self.let.is_set()

    def wait(self) -> Any:
        version, self._pushed = self._pushed, None
        return SimpleNamespace(version=version, servers=(SERVER,), pause_ms=(4.0, 6.0), transfer_ms=9.0, errors={})

    def close(self) -> None: ...


def trainer_context(run_dir: Path, cfg: Config, num_ranks: int = 1) -> RoleContext:
    """The trainer's role on one CPU core beside one server; nobody reads its status."""
    jobs = {
        "finetune": (Job(name="finetune_0", kind="finetune", cores=(0,), num_ranks=num_ranks),),
        "actor_llm": (Job(name=SERVER, kind="actor_llm"),),
    }
    world: Any = SimpleNamespace(accelerator="cpu", trainer_world_size=num_ranks, get=lambda kind: jobs.get(kind, ()))
    status: Any = SimpleNamespace(progress=lambda **_: None, waiting=lambda *_, **__: contextlib.nullcontext())
    return RoleContext(
        run_dir=run_dir, job=jobs["finetune"][0], cfg=cfg, world=world, status=status, stop=threading.Event()
    )
