"""Fourteen failures planted into real runs, and three healthy ones: which causes does `pipelinerl why` name first?

    python -m benchmarks.why --json benchmarks/why.json
    python -m benchmarks.why --cases "wrong sign" healthy-1 --folder results/why --json benchmarks/why.json

Every case is a whole run of the quickstart (real servers, launcher, trainer), shortened to `--steps` optimizer steps,
with one fault from `why_task.py` or one wrong key. `rank` is the place of the right cause, 1 = first, null = not named.
A healthy run is silent if no cause is named. Results are added to the file: a case that is in it is not run again
unless it is named. `--again` reads the runs that `--folder` kept once more and trains nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import commit
from pipelinerl.tiny_model import build

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
TASK = "benchmarks.why_task"
OTHER_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '[' + message.role | upper + '] ' + message.content + ' [/' + message.role | upper + ']' }}"
    "{%- endfor -%}"
)
"""A chat template of another family of models."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the names of causes of which one is to stand first. No name = the run is healthy."""

    right: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


def rollout(name: str) -> str:
    return f"actor.rollout_policy={TASK}.{name}"


CASES = {
    **{f"healthy-{seed}": Case(seed=seed) for seed in (1, 2, 3)},
    "wrong sign": Case(right=("wrong sign",), keys=(f"finetune.rl.policy_loss={TASK}.wrong_sign",)),
    "reward leak": Case(right=("reward hack",), keys=(rollout("leaking"),)),
    "learning rate": Case(right=("learning rate too high",), keys=("finetune.learning_rate=1.5e-2",)),
    "dropped EOS": Case(right=("end of answers not trained",), keys=(rollout("without_end"),)),
    "stale weights": Case(
        right=("stale server", "stalled version"), keys=("weights.probe=false",), env={"WHY_STALE": "20"}
    ),
    "too hard": Case(right=("too hard",), keys=(rollout("too_hard"),)),
    "too easy": Case(right=("too easy",), keys=(rollout("too_easy"),)),
    "length explosion": Case(
        right=("length explosion",),
        keys=(rollout("paid_by_length"), "llm.parameters.max_tokens=64", "test_llm.parameters.max_tokens=64"),
    ),
    "entropy collapse": Case(
        right=("entropy collapse",),
        keys=(f"finetune.rl.policy_loss={TASK}.certain", "finetune.learning_rate=1e-3"),
    ),
    "wrong template": Case(right=("bad tokenizer",), keys=("llm.chat_template={folder}/other.jinja",)),
    "truncated prompts": Case(right=("truncated prompts",), keys=(rollout("truncated"),)),
    "wrong references": Case(right=("confident failures",), keys=(rollout("wrong_references"),)),
    "noisy judge": Case(right=("noisy judge",), keys=(rollout("tossed"),)),
    "judge down": Case(right=("judge down",), keys=(rollout("judge_down"),), env={"WHY_JUDGED": "3200"}),
}


def environment(folder: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The lying server is a plugin of vLLM in these processes, and nowhere else."""
    described = folder / "why_task-1.0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: why_task\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text(f"[vllm.general_plugins]\nwhy_task = {TASK}:lie\n")
    path = [str(ROOT), os.environ.get("PYTHONPATH", ""), *([str(folder)] if "WHY_STALE" in extra else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(part for part in path if part)} | extra


def train(case: Case, folder: Path, run_dir: Path, steps: int, seed: int) -> int:
    """Run the case and return the launcher's exit code."""
    given = [f"output_dir={run_dir}", f"model_path={folder / 'model'}", "tiny_model=null", f"seed={case.seed + seed}"]
    given += [f"finetune.max_train_steps={steps}", f"eval_every_n_versions={steps // 2}"]
    given += ["launcher.startup_timeout_s=900", *(key.format(folder=folder) for key in case.keys)]
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", *given]
    with (folder / f"{run_dir.name}.log").open("w") as log:
        done = subprocess.run(
            command,
            env=environment(folder, case.env),
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    return done.returncode


def diagnose(run_dir: Path, case: Case) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pipelinerl", "why", str(run_dir), "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    if done.returncode not in (0, 1) or not done.stdout:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout)
    names = [cause["title"] for cause in found]
    rank = next((place for place, name in enumerate(names, 1) if name in case.right), None)
    result: dict[str, Any] = {"causes": names, "evidence": [cause["evidence"] for cause in found]}
    return result | ({"rank": rank} if case.right else {"silent": not found})


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    planted = [result["rank"] for result in results.values() if "rank" in result]
    healthy = [result["silent"] for result in results.values() if "silent" in result]
    return {"first": f"{planted.count(1)} of {len(planted)}", "silent": f"{sum(healthy)} of {len(healthy)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), help="run these, also if the file has them")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of a run")
    parser.add_argument("--seed", type=int, default=0, help="added to the seeds of all runs")
    parser.add_argument("--folder", type=Path, help="keep the model and the runs here")
    parser.add_argument("--again", action="store_true", help="diagnose the kept runs again")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    before = json.loads(args.json.read_text())["cases"] if args.json.exists() else {}
    with tempfile.TemporaryDirectory(prefix="why-") as scratch:
        folder = (args.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "other.jinja").write_text(OTHER_TEMPLATE)
        build(folder / "model", "largest", 0, {"max_number": 30}, if_missing=True)
        kept = [name for name in CASES if (folder / name.replace(" ", "_")).exists()]
        for name in args.cases or (kept if args.again else [name for name in CASES if name not in before]):
            case, run_dir = CASES[name], folder / name.replace(" ", "_")
            result = dict(before.get(name, {}))
            if not args.again:
                began = time.monotonic()
                code = train(case, folder, run_dir, args.steps, args.seed)
                result |= {"exit": code, "wall_s": round(time.monotonic() - began), "steps": args.steps}
            before[name] = result | diagnose(run_dir, case)
            document = {"benchmark": "why", "commit": commit(), "summary": summary(before)}
            args.json.write_text(json.dumps(document | {"cases": before}, indent=2) + "\n")
            print(f"{name}: {json.dumps(before[name])}", flush=True)
        print(json.dumps(summary(before)))


if __name__ == "__main__":
    main()
