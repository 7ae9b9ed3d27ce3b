"""The launcher's real command line with light roles, for tests: `python launcher_fakes.py launch <arguments>`.

Every role but redis is this script as well (`python launcher_fakes.py role --run-dir R --job J`). What a role does is
told by the environment variable FAKE_<KIND>, a comma-separated list of behaviours; unset = the role does its part of a
short run. FAKE_LAUNCHER=whole makes the launcher check the domain, and draw the curve and write the page of a run, as
well.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

NUM_STEPS = 3


def launch(arguments: list[str]) -> int:
    from pipelinerl.inspect import report
    from pipelinerl.launcher import preflight
    from pipelinerl.launcher.command_line import main
    from pipelinerl.launcher.commands import RoleCommand, role_command
    from pipelinerl.launcher.reporting import RunReports
    from pipelinerl.world import Job, WorldMap

    def command_of(job: Job, world: WorldMap, run_dir: Path, env: Mapping[str, str]) -> RoleCommand:
        command = role_command(job, world, run_dir, env)
        if job.kind == "redis":
            return command
        role = (__file__, "role", "--run-dir", str(run_dir), "--job", job.name)
        return replace(command, argv=(sys.executable, *role))

    if "whole" not in behaviours("launcher"):
        preflight.check_domain = lambda container: []
        RunReports._write_page = do_nothing  # type: ignore[method-assign]
        report.draw_learning_curve = lambda *_: None
    return main(arguments, command_of=command_of)


async def do_nothing(*_: object) -> None: ...


def behaviours(kind: str) -> list[str]:
    return [item for item in os.environ.get(f"FAKE_{kind.upper()}", "").split(",") if item]


def first_time(context: Any, name: str) -> bool:
    """True once per run folder: a behaviour that a restarted role must not repeat."""
    marker = context.run_dir / f"{context.job.name}.{name}"
    if marker.exists():
        return False
    marker.touch()
    return True


def misbehave(context: Any) -> None:
    from pipelinerl.errors import DomainError
    from pipelinerl.observability.status import read_statuses

    for behaviour in behaviours(context.job.kind):
        match behaviour:
            case "crash":
                raise RuntimeError("this role is broken")
            case "crash_once" if first_time(context, "crashed"):
                raise RuntimeError("this role stumbled")
            case "refuse":
                raise DomainError("the domain raised on every rollout")
            case "freeze_once" if first_time(context, "frozen"):
                context.status.progress()
                while not read_statuses(context.run_dir)[context.job.name].progress_count:  # not in its start
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang_once" if first_time(context, "hung"):
                context.status.progress(hung=True)
                time.sleep(3600)
            case "exit_early":
                sys.exit(0)
            case "ignore_sigterm":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "leave_child":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            case "leave_daemons" if first_time(context, "daemons"):
                subprocess.run(["sh", "-c", os.environ["FAKE_DAEMONS"]], check=True)
            case "leave_memory":
                (context.run_dir / "segment").write_text(leave_memory())


def leave_memory() -> str:
    """A segment that nobody unlinks, as a killed process leaves it."""
    from multiprocessing import resource_tracker

    segment = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
    globals()["kept_segment"] = segment
    return segment.name


def role(context: Any) -> None:
    with open(context.run_dir / "environment.jsonl", "a") as stream:
        stream.write(json.dumps({"job": context.job.name, "pid": os.getpid(), "env": dict(os.environ)}) + "\n")
    misbehave(context)
    match context.job.kind:
        case "finetune":
            train(context)
        case "actor":
            act(context)
        case _:
            serve(context)


def serve(context: Any) -> None:
    while not context.stop.wait(0.05):
        context.status.progress()


def train(context: Any) -> None:
    from pipelinerl.records.messages import SamplesProcessed, TrainerMessage, TrainingDone, WeightUpdateSuccess
    from pipelinerl.streams import SingleStreamSpec, open_writer

    with open_writer(SingleStreamSpec(context.run_dir, "trainer"), TrainerMessage) as writer:
        for step in range(NUM_STEPS + 1):
            if context.stop.wait(0.1):
                return
            writer.write(
                WeightUpdateSuccess(
                    version=step, servers=("actor_llm_0",), pause_ms=(10.0 * step,), timestamp=time.time()
                )
            )
            if step:
                metrics = {"reward": 0.1 * step, "lag_mean": 1.0, "lag_max": 2.0, "tokens": 100.0, "wait_s": 0.5}
                writer.write(
                    SamplesProcessed(samples_processed=64 * step, step=step, metrics=metrics, timestamp=time.time())
                )
            context.status.progress(step=step)
            while "endless" in behaviours("finetune") and not context.stop.wait(0.05):
                context.status.progress()
            while "held" in behaviours("finetune") and not (context.run_dir / "may_end").exists():
                context.status.progress()
                if context.stop.wait(0.05):
                    return
            if "slow_save" in behaviours("finetune"):
                save_slowly(context)
                return
        writer.write(TrainingDone(step=NUM_STEPS, timestamp=time.time()))


def save_slowly(context: Any) -> None:
    """Makes a step that is not saved; when asked to stop, saves it when the test says so."""
    context.status.progress(saved=False)
    context.stop.wait()
    (context.run_dir / "saving").touch()
    while not (context.run_dir / "may_save").exists():
        time.sleep(0.02)
    (context.run_dir / "saved").touch()


def act(context: Any) -> None:
    from pipelinerl.records.messages import EvaluationDone, EvaluationMessage
    from pipelinerl.state import TrainerState
    from pipelinerl.streams import SingleStreamSpec, open_writer

    def evaluated(version: int, success: float) -> EvaluationDone:
        return EvaluationDone(
            version=version, success=success, reward=success, num_rollouts=8, metrics={}, timestamp=time.time()
        )

    state = TrainerState(context.run_dir)
    state.start_listening()
    with open_writer(SingleStreamSpec(context.run_dir, "evaluation"), EvaluationMessage) as writer:
        writer.write(evaluated(0, 0.25))
        while not state.wait_for_training_done(timeout=0.1):
            context.status.progress()
            if context.stop.is_set():
                break
        else:
            writer.write(evaluated(NUM_STEPS, 0.75))
    state.stop()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        print("the interpreter is up", flush=True)
        sys.exit(launch(sys.argv[2:]))
    del sys.argv[1]
    from pipelinerl.membership.role import run_role

    run_role(role)
