"""Kills and freezes roles of real runs at seeded random moments: does the run end as if nothing had happened, how soon?

    python -m benchmarks.recovery --runs 50 --json benchmarks/recovery.json
    python -m benchmarks.recovery --runs 50 --faults 2 --victims finetune@checkpoint redis --actions freeze
    python -m benchmarks.recovery --frozen-server --json benchmarks/frozen_server.json
    python -m benchmarks.recovery --idle --json benchmarks/idle.json

Each run is a short quickstart on one prebuilt model with `--faults` strikes, dealt from a seeded deck of victims ×
actions: SIGKILL, or SIGSTOP for ever (the supervisor's heartbeat rule must act). A world has what its victims need: a
second inference server, redis, a verifier that judges every answer. Every fifth run is left undisturbed, for
comparison. `finetune@update` and `finetune@checkpoint` strike while weights are on their way and while a checkpoint is
being written, `finetune@evaluation` after the last step, `@startup` before a job has done anything, `@resume` the same
after the launcher was killed and started again, `@summary` when all roles have ended. Besides jobs, there are the
launcher, its reaper, two jobs at once, the engine of a server, a disk that is full or whose writes wait for three
seconds (the run folder is a file system of its own then, which needs root), the clock of all Python processes set back
by an hour, a redis that is paused, cuts its clients off, is full or asleep, and a domain that misbehaves
(`misbehaving.py`).

A run passes when it ends with exit 0 (the same command is started again where it did not), the ledger shows every
optimizer step trained from distinct samples and none lost without a reason, and no process, port, shared-memory
segment, temporary folder or half-written checkpoint is left. Held-out success is compared with that of the undisturbed
runs. `recovery_s` is the time from the strike to the next progress of the role's new process, `stall_s` the longest
pause between two optimizer steps from the first strike on.

Results are appended: the same command goes on where it was interrupted.
"""

import argparse
import json
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from benchmarks.struck_run import (
    AROUND,
    Action,
    Blow,
    Outcome,
    Strike,
    StruckRun,
    processes_of,
    run_struck,
    stop,
)
from pipelinerl.inspect.reading import look_into
from pipelinerl.launcher.reaper import signal_all
from pipelinerl.observability.status import read_statuses
from pipelinerl.records import TrainerMessage, WeightUpdateSuccess
from pipelinerl.streams import SingleStreamSpec, open_reader

UPDATE_S = 0.06
"""About how long an update of the tiny model is on its way."""
CAMPAIGN_STEPS = 64
UNDISTURBED_EVERY = 5
TWO_SERVERS = ("world.cpu_slots=3", "world.actor_fraction=2", "world.finetune_fraction=1")
JUDGED = (
    "world.verifier_replicas=1",
    "actor.rollout_policy=benchmarks.judged.generate_rollout",
    "dataset_loader=benchmarks.judged.load_problems",
)
MISBEHAVING = ("actor.rollout_policy=benchmarks.misbehaving.generate_rollout",)
REDIS = ("streams=redis",)
WORLDS = {"actor_llm": TWO_SERVERS, "verifier": JUDGED, "redis": REDIS, "domain": MISBEHAVING} | {
    victim: REDIS for victim in AROUND if victim.startswith("redis-")
}
"""What the quickstart's world needs for a victim of this kind."""
VICTIMS = (
    *("actor", "actor_llm", "preprocessor", "finetune", "finetune@update", "finetune@checkpoint"),
    *("verifier", "redis", "finetune@evaluation"),
)
AROUND_ROLES = (
    *("launcher", "launcher@startup", "launcher@summary", "reaper", "disk", "clock", "engine", "actor+finetune"),
    *("actor_llm@startup", "finetune@startup", "actor@resume", "finetune@resume", "preprocessor+actor_llm"),
    *("engine+worker", "writes", "domain", "redis-paused", "redis-cut", "redis-full", "redis-asleep"),
)
"""Victims that are killed (or what `AROUND` says), never frozen."""
SHORT = (
    "tiny_model.seed=0",
    "finetune.save_checkpoint_steps=8",
    "launcher.heartbeat_timeout_s=12",
    "launcher.hang_timeout_s=60",
    "launcher.max_restarts=20",
    "weights.timeout_s=10",
    "max_lag_steps=1",
    "dataset_loader_params.num_test_problems=256",
)
# The campaign


def deal(seed: int, index: int, args: argparse.Namespace) -> list[Strike]:
    """The strikes of run ``index``: a pure function of the arguments. The deck is shuffled anew when it is used up."""
    if index % UNDISTURBED_EVERY == UNDISTURBED_EVERY - 1:
        return []
    disturbed = index - index // UNDISTURBED_EVERY
    deck = [(victim, action) for victim in args.victims if victim not in AROUND_ROLES for action in args.actions]
    deck += [(victim, "kill") for victim in args.victims if victim in AROUND_ROLES]
    cards = []
    for place in range(disturbed * args.faults, (disturbed + 1) * args.faults):
        shuffled = random.Random(f"{seed}/{place // len(deck)}").sample(deck, len(deck))
        cards.append(shuffled[place % len(deck)])
    rng = random.Random(f"{seed}/run {index}")
    strikes = [make_strike(rng, victim, action, args.steps) for victim, action in cards]
    return sorted(strikes, key=lambda strike: strike.step)


KINDS = {"engine": "actor_llm", "worker": "actor"}
"""Victims that are part of a job."""


def make_strike(rng: random.Random, victim: str, action: Action, steps: int) -> Strike:
    """A random moment for ``victim``: a kind, or several joined by +, with an optional `@<moment>`."""
    kinds, _, moment = victim.partition("@")
    longest = {"update": UPDATE_S, "checkpoint": 0.03, "summary": 1.0, "startup": 5.0, "resume": 5.0}.get(moment, 0.5)
    return Strike(
        job=kinds if kinds in AROUND else "+".join(f"{KINDS.get(kind, kind)}_0" for kind in kinds.split("+")),
        step=2 if kinds == "domain" else step_of(moment, steps, rng),  # it has many ways
        action=action,
        moment=moment or "any",  # type: ignore[arg-type]
        delay_s=round(rng.uniform(0.0, longest), 3),
        child=kinds in ("engine", "engine+worker")
        or (kinds in ("actor_llm", "redis") and not moment and rng.random() < 0.5),
    )


def step_of(moment: str, steps: int, rng: random.Random) -> int:
    """The optimizer step after which to strike."""
    if moment in ("evaluation", "summary"):
        return steps
    return 0 if moment == "startup" else rng.randrange(2, steps - 9)


def world_of(strikes: Sequence[Strike]) -> list[str]:
    """Overrides for a world in which there is what is to be struck."""
    kinds = {job.rpartition("_")[0] or job for strike in strikes for job in strike.job.split("+")}
    return [override for kind in sorted(kinds & WORLDS.keys()) for override in WORLDS[kind]]


def run_campaign(args: argparse.Namespace, folder: Path, results: list[dict[str, Any]]) -> None:
    """Appends the missing runs to the results, and writes them after each."""
    made = {result["index"] for result in results}
    missing = [index for index in range(args.runs) if index not in made]
    pool = ThreadPoolExecutor(args.jobs)
    try:
        for indices in (missing[:1], missing[1:]):  # the first one alone: it makes the model
            for finished in as_completed([pool.submit(run_dealt, args, folder, index) for index in indices]):
                results.append(finished.result())
                results.sort(key=lambda result: result["index"])
                print(json.dumps(finished.result()), flush=True)
                write(args, results)
    finally:
        pool.shutdown(cancel_futures=True)


def run_dealt(args: argparse.Namespace, folder: Path, index: int) -> dict[str, Any]:
    """Run ``index`` of the campaign; its folder stays if it failed."""
    strikes = deal(args.seed, index, args)
    overrides = [f"model_path={folder / 'model'}", *SHORT, *world_of(strikes), *args.overrides]
    outcome = run_struck(folder / f"run{index}", strikes, overrides, steps=args.steps, timeout_s=args.timeout)
    if not outcome.problems:
        shutil.rmtree(folder / f"run{index}")
    return {"seed": args.seed, "index": index, "world": world_of(strikes), **row(outcome)}


def row(outcome: Outcome) -> dict[str, Any]:
    """One run as one line."""
    return {
        "passed": not outcome.problems,
        "problems": outcome.problems,
        "strikes": [blow_row(blow) for blow in outcome.blows],
        "missed": outcome.missed,
        "launches": outcome.launches,
        "exit_code": outcome.exit_code,
        "success": outcome.success,
        "samples": outcome.samples,
        "restarts": outcome.restarts,
        "stall_s": round(outcome.stall_s, 2),
        "seconds": round(outcome.seconds, 1),
    }


def blow_row(blow: Blow) -> dict[str, Any]:
    plain = asdict(blow.strike)
    recovery = None if blow.recovery_s is None else round(blow.recovery_s, 2)
    return {name: value for name, value in plain.items() if value is not None} | {"recovery_s": recovery}


def write(args: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    """The document: figures over all runs, then one line per run."""
    if not args.json:
        return
    head = json.dumps({"command": " ".join(sys.argv), "seed": args.seed, **figures(results)}, indent=2)
    rows = ",\n".join("    " + json.dumps(result) for result in results)
    args.json.write_text(head.removesuffix("\n}") + ',\n  "results": [\n' + rows + "\n  ]\n}\n")


def figures(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Passed runs, strikes by victim, success with and without disturbance, recovery times."""
    calm = [r["success"] for r in results if not r["strikes"] and r["success"] is not None]
    struck = [r["success"] for r in results if r["strikes"] and r["success"] is not None]
    blows = [blow for result in results for blow in result["strikes"]]
    return {
        "runs": len(results),
        "runs_struck": sum(bool(r["strikes"]) for r in results),
        "passed": sum(r["passed"] for r in results),
        "strikes": len(blows),
        "success_undisturbed": spread(calm),
        "success_struck": spread(struck),
        "by_victim": {
            name: recovery([b for b in blows if victim_of(b) == name]) for name in sorted(set(map(victim_of, blows)))
        },
    }


def victim_of(blow: dict[str, Any]) -> str:
    kind = "+".join(job.rpartition("_")[0] or job for job in blow["job"].split("+")) + (
        "" if blow["moment"] == "any" else f"@{blow['moment']}"
    )
    return f"{blow['action']} {kind}{' child' if blow['child'] else ''}"


def recovery(blows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How often, and the seconds from strike to progress where the role came back before the run ended."""
    times = sorted(blow["recovery_s"] for blow in blows if blow["recovery_s"] is not None)
    return {"strikes": len(blows)} | ({"median_s": times[len(times) // 2], "max_s": times[-1]} if times else {})


def spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"runs": 0}
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    numbers = {"mean": statistics.fmean(values), "sd": deviation, "min": min(values), "max": max(values)}
    return {"runs": len(values)} | {name: round(number, 4) for name, number in numbers.items()}


# One frozen server


def measure_frozen_server(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One of two servers frozen for the rest of the run, which no supervisor ends: what do the updates cost?"""
    run_dir = folder / "frozen"
    timeouts = ("launcher.heartbeat_timeout_s=3600", "launcher.hang_timeout_s=3600", "weights.timeout_s=10")
    overrides = [f"model_path={folder / 'model'}", *SHORT, *TWO_SERVERS, *timeouts, *args.overrides]
    strike = Strike(job="actor_llm_1", step=5, action="freeze")
    outcome = run_struck(run_dir, [strike], overrides, steps=args.steps, timeout_s=args.timeout)
    with look_into(run_dir), open_reader(SingleStreamSpec(run_dir, "trainer"), TrainerMessage, name=None) as reader:
        messages = [m for _, m in reader.read_all() if isinstance(m, WeightUpdateSuccess)]
    updates = [m for m in messages if m.version]  # the first one waits for cold servers
    struck = outcome.blows[0].time
    before = sorted(m.transfer_ms / 1e3 for m in updates if m.timestamp < struck)
    after = sorted(m.transfer_ms / 1e3 for m in updates if m.timestamp >= struck)
    return {
        "weights_timeout_s": 10,
        "updates_before": {"count": len(before), "median_s": statistics.median(before), "max_s": before[-1]},
        "updates_after": {"count": len(after), "median_s": statistics.median(after), "two_slowest_s": after[-2:]},
        "servers_at_end": list(updates[-1].servers),
        **row(outcome),
    }


# Waiting


def measure_idle(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """CPU of every role, its workers included, while the trainer is frozen for a while and all others wait for it."""
    startup_s, measure_s = 8.0, 15.0
    overrides = [f"model_path={folder / 'model'}", *SHORT, "launcher.heartbeat_timeout_s=120", *args.overrides]
    run = StruckRun(folder / "idle", overrides, args.steps, args.timeout)
    try:
        run.wait_for(lambda: run.has_made(5))
        statuses = read_statuses(run.run_dir)
        trainer = processes_of(statuses["finetune_0"])
        signal_all(trainer, signal.SIGSTOP)
        time.sleep(startup_s)
        waiting = {name: processes_of(status) for name, status in statuses.items() if name != "finetune_0"}
        waiting["launcher"] = [run.launcher.pid]
        before = {name: sum(map(cpu_seconds, pids)) for name, pids in waiting.items()}
        time.sleep(measure_s)
        cores = {name: (sum(map(cpu_seconds, pids)) - before[name]) / measure_s for name, pids in waiting.items()}
        signal_all(trainer, signal.SIGCONT)
        code = run.end()
    finally:
        stop(run.launcher)
    return {"seconds": measure_s, "cores": {n: round(c, 4) for n, c in cores.items()}, "passed": code == 0}


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--faults", type=int, default=1, help="strikes per run")
    parser.add_argument("--victims", nargs="+", choices=(*VICTIMS, *AROUND_ROLES), default=(*VICTIMS, *AROUND_ROLES))
    parser.add_argument("--actions", nargs="+", choices=("kill", "freeze"), default=("kill", "freeze"))
    parser.add_argument("--frozen-server", action="store_true", help="measure updates beside a server frozen for ever")
    parser.add_argument("--idle", action="store_true", help="measure what roles cost that wait for a frozen trainer")
    parser.add_argument("--steps", type=int, default=CAMPAIGN_STEPS)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a run may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="model and run folders that failed (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="configuration overrides, as for pipelinerl.launch")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="recovery-"))).resolve()
    if args.frozen_server or args.idle:
        document = (measure_frozen_server if args.frozen_server else measure_idle)(args, folder)
        print(json.dumps(document, indent=2))
        if args.json:
            args.json.write_text(json.dumps(document, indent=2) + "\n")
        sys.exit(0 if document["passed"] else 1)
    results = json.loads(args.json.read_text())["results"] if args.json and args.json.exists() else []
    run_campaign(args, folder, results)
    print(json.dumps(figures(results), indent=2))
    sys.exit(0 if all(result["passed"] for result in results) else 1)


if __name__ == "__main__":
    main()
