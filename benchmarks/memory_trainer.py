"""Memory of the trainer over thousands of optimizer steps of a tiny model.

    python -m benchmarks.memory_trainer --json benchmarks/memory_trainer.json

The trainer's loop runs here on recorded micro-batches, with weight updates to a sender that keeps nothing, metrics and
checkpoints. Resident memory is read after every step; `growth` as in `memory_flat`.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.memory_flat import folder_kb, growth, write_results
from benchmarks.provenance import machine
from benchmarks.synthetic_batches import make_samples, pack, split_evenly
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.loop import Trainer
from pipelinerl.records import MicroBatch
from pipelinerl.streams import SingleStreamSpec, open_writer, set_streams_backend
from tests.models import save_qwen2
from tests.trainer_kit import FakeSender, trainer_context

VOCAB, BATCH, LENGTHS = 64, 8, (20, 60)


class Forgetful(FakeSender):
    """Reads the tensors of every version and keeps none; notes the memory."""

    def __init__(self) -> None:
        super().__init__(keeps_weights=False)
        self.curve: list[dict[str, float]] = []

    def send(self, version: int, *rest: Any) -> None:
        super().send(version, *rest)
        self.received.clear()
        self.scores.clear()
        self.curve.append({"update": version, "trainer": round(psutil.Process().memory_info().rss / 2**20, 2)})


def record(run_dir: Path, updates: int) -> None:
    with open_writer(SingleStreamSpec(run_dir, "training_data"), MicroBatch) as writer:
        for step in range(updates):
            samples = make_samples(0, BATCH, vocab_size=VOCAB, lengths=LENGTHS, step=step, max_lag=2)
            for batch in pack(samples, split_evenly(BATCH, 2), step, ref=False):
                writer.write(batch)


def measure(updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        save_qwen2(run_dir / "model", VOCAB)
        set_streams_backend("files")
        record(run_dir, updates)
        cfg = compose(
            "base",
            [
                *(f"output_dir={run_dir}", f"model_path={run_dir / 'model'}", "finetune.dtype=float32"),
                *("dataset_loader=a.b", "actor.rollout_policy=a.b", "wandb.mode=disabled"),
                *(f"finetune.max_train_steps={updates}", f"finetune.save_checkpoint_steps={max(1, updates // 8)}"),
            ],
        )
        sender, started = Forgetful(), time.monotonic()
        Trainer(trainer_context(run_dir, parse(cfg)), lambda _: sender).run()
        wall_s, sizes = time.monotonic() - started, folder_kb(run_dir)
    return {
        "machine": machine(),
        "updates": updates,
        "wall_s": round(wall_s, 1),
        "growth": {"trainer": growth(sender.curve, "trainer", updates)},
        "run_folder_kb": sizes,
        "rss_mb": sender.curve[:: max(1, len(sender.curve) // 100)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--updates", type=int, default=2000)
    args = parser.parse_args()
    write_results(measure(args.updates), args.json)


if __name__ == "__main__":
    main()
