"""Memory of the actor, its worker and the preprocessor over thousands of updates, against a fake server and trainer.

    python -m benchmarks.memory_flat --json benchmarks/memory_flat.json

The roles are real processes on file streams. The trainer is played here: it takes every micro-batch from topic
`training_data`, commits, and announces the next version. Resident memory is read a thousand times in 3,000 updates of
64 rollouts; `growth` is its mean in the last tenth over its mean around update 200. The sizes of the run folder's parts
at the end say what is bounded and what grows.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from benchmarks.provenance import machine
from pipelinerl.config.load import compose, load_run
from pipelinerl.records import (
    MicroBatch,
    PreprocessorProgress,
    SamplesProcessed,
    TrainerMessage,
    WeightUpdateSuccess,
    topics,
)
from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader, open_writer
from pipelinerl.testing import FakeServer, byte_tokenizer, save_tokenizer
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node

TOKENIZER = byte_tokenizer()
BATCH, ATTEMPTS = 64, 8
ROLES = {"actor_0": "pipelinerl.actor", "preprocessor_0": "pipelinerl.preprocess"}
WARM_UPDATES = 200


def write_run(run_dir: Path, url: str, updates: int) -> None:
    save_tokenizer(run_dir / "model", TOKENIZER)
    (run_dir / "model" / "config.json").write_text(f'{{"vocab_size": {len(TOKENIZER)}}}')
    cfg = compose(
        "base",
        [
            f"output_dir={run_dir}",
            f"model_path={run_dir / 'model'}",
            "dataset_loader=pipelinerl.domains.largest.load_problems",
            "actor.rollout_policy=pipelinerl.domains.largest.generate_rollout",
            *(f"attempts={ATTEMPTS}", f"finetune.gradient_accumulation_passes={BATCH}"),
            *(f"finetune.max_train_steps={updates}", "max_lag_steps=3", "llm.parameters.max_tokens=64"),
            *("eval.at_start=false", "eval.at_end=false", "eval_every_n_versions=0", "wandb.mode=disabled"),
        ],
    )
    container: Any = OmegaConf.to_container(cfg, resolve=True)
    container.pop("hydra", None)
    (run_dir / "conf").mkdir()
    OmegaConf.save(OmegaConf.create(container), run_dir / "conf" / "config.yaml")
    jobs = (
        *(Job(name="actor_0", kind="actor"), Job(name="preprocessor_0", kind="preprocessor")),
        *(Job(name="actor_llm_0", kind="actor_llm", url=url), Job(name="finetune_0", kind="finetune", num_ranks=1)),
    )
    nodes = (Node(rank=0, hostname="127.0.0.1", devices=1, cores=(0,)),)
    WorldMap(accelerator="cpu", nodes=nodes, jobs=jobs, master_port=1, weight_port=2, weight_ports=1).save(run_dir)


@asynccontextmanager
async def roles(run_dir: Path) -> AsyncIterator[dict[str, subprocess.Popen[bytes]]]:
    running = {}
    for job, module in ROLES.items():
        with open(run_dir / f"{job}.out", "wb") as log:  # noqa: ASYNC230
            command = [sys.executable, "-m", module, "--run-dir", str(run_dir), "--job", job]
            running[job] = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        yield running
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            await asyncio.to_thread(process.wait, 20)


def resident_mb(running: dict[str, subprocess.Popen[bytes]]) -> dict[str, float]:
    """Memory of each role, and of the actor's worker."""
    found = {}
    for job, process in running.items():
        assert process.poll() is None, f"{job} ended with {process.returncode}"
        found[job] = psutil.Process(process.pid).memory_info().rss
    workers = [c for c in psutil.Process(running["actor_0"].pid).children() if "spawn_main" in " ".join(c.cmdline())]
    found["worker"] = sum(worker.memory_info().rss for worker in workers)
    return {job: round(num_bytes / 2**20, 2) for job, num_bytes in found.items()}


async def train(
    run_dir: Path, server: FakeServer, updates: int, running: dict[str, subprocess.Popen[bytes]], deadline: float
) -> list[dict[str, float]]:
    """Plays the trainer; returns the curve."""
    curve: list[dict[str, float]] = []
    every, samples, step = max(1, updates // 1000), 0, 0
    with (
        open_writer(SingleStreamSpec(run_dir, topics.TRAINER), TrainerMessage) as trainer_topic,
        open_reader(SingleStreamSpec(run_dir, topics.TRAINING_DATA), MicroBatch, name="finetune_0") as data,
        open_reader(SingleStreamSpec(run_dir, topics.PREPROCESSOR), PreprocessorProgress, name=None) as packed,
    ):
        trainer_topic.write(WeightUpdateSuccess(version=0, servers=("actor_llm_0",)))
        while step < updates:
            assert time.monotonic() < deadline, f"update {step} of {updates} at the deadline"
            for _, progress in await asyncio.to_thread(packed.poll, 0.05):
                if not progress.packed_sample_ids:
                    continue
                step, samples = progress.step, samples + len(progress.packed_sample_ids)
                data.read_all()
                data.commit(data.position)
                server.version = step
                server.requests.clear()
                trainer_topic.write(SamplesProcessed(samples_processed=samples, step=step))
                trainer_topic.write(WeightUpdateSuccess(version=step, servers=("actor_llm_0",)))
                if step % every == 0:
                    curve.append({"update": step, **resident_mb(running)})
    return curve


def growth(curve: list[dict[str, float]], job: str, updates: int) -> float:
    """Mean of the last tenth over the mean between updates 200 and 300 (of a tenth, in shorter runs)."""
    first = min(WARM_UPDATES, updates // 10)
    early = [point[job] for point in curve if first <= point["update"] <= 1.5 * first]
    late = [point[job] for point in curve if point["update"] > 0.9 * updates]
    return round(sum(late) / len(late) / (sum(early) / len(early)), 4)


def folder_kb(run_dir: Path) -> dict[str, int]:
    """Sizes of the run folder's parts."""
    parts = [*sorted((run_dir / "streams").iterdir()), *(p for p in sorted(run_dir.iterdir()) if p.name != "streams")]
    sizes = {}
    for part in parts:
        files = [path for path in ([part] if part.is_file() else part.rglob("*")) if path.is_file()]
        sizes[str(part.relative_to(run_dir))] = sum(path.stat().st_size for path in files) // 1024
    return sizes


async def measure(updates: int, limit_s: float) -> dict[str, Any]:
    def answer(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
        return [*TOKENIZER.encode(f"<answer>{index}</answer>"), TOKENIZER.eos_token_id]

    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        async with FakeServer(answer) as server:
            write_run(run_dir, server.url, updates)
            backend_from_config(load_run(run_dir), run_dir)
            started = time.monotonic()
            async with roles(run_dir) as running:
                curve = await train(run_dir, server, updates, running, started + limit_s)
        wall_s = time.monotonic() - started
        sizes = folder_kb(run_dir)
    return {
        "machine": machine(),
        "updates": updates,
        "rollouts": updates * BATCH,
        "wall_s": round(wall_s, 1),
        "growth": {job: growth(curve, job, updates) for job in (*ROLES, "worker")},
        "run_folder_kb": sizes,
        "rss_mb": curve[:: max(1, len(curve) // 100)],
    }


def write_results(results: dict[str, Any], path: Path | None) -> None:
    """Print the results without the curve, and write all of them to ``path``."""
    print(json.dumps({key: value for key, value in results.items() if key != "rss_mb"}, indent=2))
    if path:
        path.write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="give up after this long")
    args = parser.parse_args()
    write_results(asyncio.run(measure(args.updates, args.limit_s)), args.json)


if __name__ == "__main__":
    main()
