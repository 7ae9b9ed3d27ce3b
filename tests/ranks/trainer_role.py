"""One rank of the trainer's role on CPU with recorded `training_data` and a server that takes everything."""

import os
from pathlib import Path
from typing import Any

from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.loop import Trainer
from pipelinerl.streams import set_streams_backend
from tests.trainer_kit import FakeSender, trainer_context


def main(job: dict[str, Any]) -> None:
    """``run_dir``: folder of the run. ``overrides``: its configuration."""
    set_streams_backend("files")
    cfg = parse(compose("base", job["overrides"]))
    ctx = trainer_context(Path(job["run_dir"]), cfg, num_ranks=int(os.environ["WORLD_SIZE"]))
    Trainer(ctx, FakeSender(keeps_weights=False, wants_scores=False)).run()
