"""Lag of every trained token and effective sample size under a bound, with a real server and random delays.

    python -m benchmarks.lag --json benchmarks/lag.json

Runs the pipeline of `schedules.py` (heavy-tailed lengths, 64 rollouts per optimizer step) for each bound.
Every rollout waits an exponentially distributed time before it asks the server, and the trainer waits before each
step. Counted are all trained tokens of topic `training_data`: the optimizer step that trains a token less the weight
version that sampled it. With a bound of 0 every token is trained by the very weights that sampled it (synchronous).
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from benchmarks import schedules_runs as runs
from benchmarks import schedules_task as task
from pipelinerl.llm import TrainableLLM
from pipelinerl.rollouts import RolloutResult

BOUNDS = (0, 1, 2, 8)
ROLLOUT_DELAY_S, TRAINER_DELAY_S = 0.3, 0.4
"""Mean of an exponential; largest of a uniform distribution."""


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    await asyncio.sleep(random.expovariate(1 / ROLLOUT_DELAY_S))
    return await task.generate_rollout(cfg, llm, problem, session)


def train_delayed(ctx: Any) -> None:
    """The trainer's role, which dawdles."""
    from pipelinerl.finetune.loop import Trainer, connect_weights

    class Delayed(Trainer):
        def advance(self) -> bool:
            time.sleep(random.uniform(0.0, TRAINER_DELAY_S))
            return super().advance()

    Delayed(ctx, connect_weights).run()


def measure(folder: Path, bound: int) -> dict[str, Any]:
    """Lags from the records that were trained, the rest from the trainer's and preprocessor's metrics."""
    from pipelinerl.observability.metrics import read_metrics
    from pipelinerl.records import MicroBatch
    from pipelinerl.records.topics import TRAINING_DATA
    from pipelinerl.streams import SingleStreamSpec, open_reader, set_streams_backend

    set_streams_backend("files")
    points = read_metrics(folder, "finetune")
    lags: Counter[int] = Counter()
    with open_reader(SingleStreamSpec(folder, TRAINING_DATA), MicroBatch, name=None) as reader:
        for _, batch in reader.read_all():
            if batch.step < len(points):
                for start, end, version in batch.spans.tolist():
                    lags[batch.step - version] += end - start
    tokens = sum(lags.values())
    assert tokens == sum(point["tokens"] for point in points), "every trained token is counted once"
    dropped = read_metrics(folder, "preprocessor")[-1]
    steps = points[len(points) // 4 :]
    return {
        "optimizer_steps": len(points),
        "trained_tokens": tokens,
        "trained_tokens_beyond_the_bound": sum(count for lag, count in lags.items() if not 0 <= lag <= bound),
        "share_of_tokens_by_lag": {str(lag): round(lags[lag] / tokens, 4) for lag in sorted(lags)},
        "lag_mean": round(sum(lag * count for lag, count in lags.items()) / tokens, 3),
        "lag_in_flight_mean": round(sum(point["lag_in_flight_mean"] for point in points) / len(points), 3),
        "ess_mean": round(sum(point["ess"] for point in points) / len(points), 4),
        "ess_min": round(min(point["ess"] for point in points), 4),
        "logratio_abs_max_at_lag_0": max(point["logratio_abs_max_lag0"] for point in points),
        "rollouts_dropped_for_their_lag": int(dropped.get("dropped/lag", 0)),
        "seconds_per_step": round((steps[-1]["time"] - steps[0]["time"]) / (len(steps) - 1), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--bounds", type=int, nargs="*", default=BOUNDS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, help="folder of the model, built there if it does not exist")
    args = parser.parse_args()
    runs.environment()
    runs.preload()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="lag-") as scratch:
        folder = Path(scratch)
        model = runs.ensure_model(args.model or folder / "model")
        with runs.running_server(model, folder / "server") as server:
            for bound in args.bounds:
                overrides = (
                    f"max_lag_steps={bound}",
                    "preprocess.lag_drop=rollout",
                    "actor.rollout_policy=benchmarks.lag.generate_rollout",
                )
                run = runs.Run(lengths="heavy", steps=args.steps, overrides=overrides, seed=args.seed)
                random.seed(args.seed + bound)
                runs.execute(run, model, folder / str(bound), server, train_delayed)
                results[str(bound)] = measure(folder / str(bound), bound)
                print(f"max_lag_steps {bound}: {json.dumps(results[str(bound)])}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"benchmark": "lag", "bounds": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
