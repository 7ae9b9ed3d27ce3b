"""Facts about a run's servers and updates from its folder: metrics, summary, and events of its logs. Only reads."""

import json
import re
from pathlib import Path
from typing import Any

from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.report import read_records
from pipelinerl.observability.catalogue import ActorMetric, TrainerMetric
from pipelinerl.observability.metrics import read_metrics

LIVE = re.compile(r"event=weights_live version=(\d+) pause_ms=([\d.]+)")
SCORED = re.compile(r"event=server_scored server=\S+ version=\d+ ([\d.e+-]+) nats, ([\d.e+-]+) are allowed")
BACKEND = re.compile(r"Using (\S+) (?:attention )?backend", re.IGNORECASE)
GRAPHS = re.compile(r"Graph capturing finished|Capturing CUDA graphs", re.IGNORECASE)
FAULTS = (
    "event=swap_failed",
    "event=weights_moved",
    "event=probe_missed",
    "event=calibration_exceeded",
    "event=weight_update_failed",
)


def run_facts(run_dir: Path) -> dict[str, Any]:
    """Facts of a run that has ended, well or not."""
    server, trainer = (log_text(run_dir / job) for job in ("actor_llm_0", "finetune_0"))
    scored = [match.groups() for match in SCORED.finditer(trainer)]
    backend = BACKEND.search(server)
    steps, played = read_metrics(run_dir, "finetune"), read_metrics(run_dir, "actor")
    return {
        "steps": len(steps),
        "swaps": len(LIVE.findall(server)),
        "pauses_ms": [float(pause) for version, pause in LIVE.findall(server) if int(version) > 0],
        "transfer_ms": [point[TrainerMetric.TRANSFER_MS] for point in steps if TrainerMetric.TRANSFER_MS in point],
        "step_s": [point[TrainerMetric.STEP_S] for point in steps],
        "noise": [float(difference) for difference, _ in scored],
        "noise_limit": max((float(limit) for _, limit in scored), default=0.0),
        "generated_per_s": [
            point[ActorMetric.TOKENS_GENERATED_PER_S] for point in played if ActorMetric.TOKENS_GENERATED_PER_S in point
        ],
        "has_graphs": GRAPHS.search(server) is not None,
        "attention_backend": backend[1] if backend else "",
        "faults": [line.strip()[:200] for line in (server + trainer).splitlines() if any(f in line for f in FAULTS)],
        "curve": curve(run_dir),
        **success(run_dir / "summary.json"),
    }


def success(path: Path) -> dict[str, float | None]:
    """Held-out success before and after. None: the run ended before it was measured."""
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: summary.get(name) for name in ("success_before", "success_after")}


def curve(run_dir: Path) -> list[tuple[int, float, float]]:
    """(version, success, reward) of the evaluations."""
    if not run_dir.is_dir():  # refused
        return []
    with look_into(run_dir):
        evaluations = read_records(run_dir, with_rollouts=False).evaluations
    evaluations.sort(key=lambda seen: seen.version)
    return [
        (seen.version, seen.success, seen.reward)
        for seen in evaluations
        if seen.success is not None and seen.reward is not None
    ]


def log_text(job: Path) -> str:
    """The log of a job with its earlier part. Empty if it never started."""
    paths = [path for name in ("log.1.txt", "log.txt") if (path := job / name).exists()]
    return "".join(path.read_text(errors="replace", encoding="utf-8") for path in paths)
