"""One rank of the trainer's role on CPU with recorded `training_data` and a server that takes everything.

python trainer_role.py RUN_DIR override…
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.loop import Trainer
from pipelinerl.observability.role import RoleContext, leave
from pipelinerl.streams import set_streams_backend
from pipelinerl.weights.probe import ProbeText
from pipelinerl.world import Job


class WillingServer:
    """Takes every update at once."""

    is_done = True
    wants_scores = False
    is_exhausted = False

    def __init__(self) -> None:
        self._report: Any = None
        self._in_service = False

    @property
    def returning(self) -> tuple[str, ...]:
        return () if self._in_service else ("actor_llm_0",)

    @property
    def is_pushing(self) -> bool:
        return self._report is not None

    def sample_text(self, shape: tuple[int, int], vocab_size: int, seed: int) -> ProbeText:
        tokens = np.random.default_rng(seed).integers(0, vocab_size, shape)
        return ProbeText(token_ids=tokens.astype(np.int32))

    def attest_with(self, text: ProbeText) -> None: ...

    def take_misses(self) -> list[Any]:
        return []

    def send_async(
        self, version: int, params: Iterable[tuple[str, Tensor]], metadata: Sequence[Any], scores: Any
    ) -> None:
        for _ in params:
            pass
        self._in_service = True
        self._report = SimpleNamespace(
            version=version, servers=("actor_llm_0",), pause_ms=(0.0,), transfer_ms=0.0, errors={}
        )

    def readmit_async(self) -> bool:
        return False

    def wait(self) -> Any:
        report, self._report = self._report, None
        return report

    def close(self) -> None: ...


def main(run_dir: Path, overrides: list[str]) -> None:
    set_streams_backend("files")
    cfg = parse(compose("base", overrides))
    num_ranks = int(os.environ["WORLD_SIZE"])
    jobs = {
        "finetune": (Job(name="finetune_0", kind="finetune", cores=(0,), num_ranks=num_ranks),),
        "actor_llm": (Job(name="actor_llm_0", kind="actor_llm"),),
    }
    ctx = RoleContext(
        run_dir=run_dir,
        job=jobs["finetune"][0],
        cfg=cfg,
        world=SimpleNamespace(accelerator="cpu", trainer_world_size=num_ranks, get=lambda kind: jobs.get(kind, ())),
        status=SimpleNamespace(progress=lambda **_: None, waiting=lambda *_, **__: contextlib.nullcontext()),
        stop=threading.Event(),
    )
    Trainer(ctx, lambda _: WillingServer()).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    leave(0)
