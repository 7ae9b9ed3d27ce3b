"""The checks: each has a time limit, returns facts as plain data, and names their judge. `problem` is why it failed."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.config.load import load_run
from pipelinerl.inspect.finding import Finding
from pipelinerl.launcher.command_line import quoted
from pipelinerl.launcher.gpu_check import verdicts
from pipelinerl.launcher.gpu_check.machine import Machine
from pipelinerl.launcher.gpu_check.run_facts import run_facts
from pipelinerl.launcher.gpu_check.verdicts import LEARNING_STEPS, WORDS_STEPS, Facts
from pipelinerl.launcher.logs import last_error_line
from pipelinerl.launcher.processes import describe_exit
from pipelinerl.launcher.trial import TrialError, TrialTimeoutError, run_trial
from pipelinerl.plan.memory import trainer_items, utilization, with_choices
from pipelinerl.plan.model_shape import ModelShape, find_model_shape
from pipelinerl.plan.speed import GPUS, find_gpu, predicted_pause_s, server_speed
from pipelinerl.world.cluster import gpu_used_bytes

HERE = "pipelinerl.launcher.gpu_check"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "WANDB_MODE": "disabled"}
LOOK_S = 0.5
"""Between two looks at the device's memory."""
STOP_S = 20
"""From SIGTERM to SIGKILL of a launcher, whose own two waves take `launcher.stop_timeout_s` (8 s) each."""
UPDATES = 20
"""Weight updates whose median pause is reported."""
HEAD_CHUNK = 1024
"""Tokens whose logits exist at a time. `auto` would take more on a large device than the plan counts."""


@dataclass(frozen=True)
class GpuCheck:
    """One check. ``facts`` gets the machine, a folder of its own, and the seconds that it may take."""

    name: str
    limit_s: float
    facts: Callable[[Machine, Path, float], Facts]
    judge: Callable[[Machine, Facts], list[Finding]]
    needs_devices: int = 1


def trial(module: str, job: Any, limit_s: float) -> Facts:
    """The answer of a module of this folder to a job, in a process of its own."""
    try:
        return {"problem": "", **run_trial("-m", f"{HERE}.{module}", job=job, timeout_s=limit_s)}
    except TrialError as error:
        return {"problem": f"{error.how}: {str(error)[:300]}"}
    except TrialTimeoutError as error:
        return {"problem": str(error)}


def launch(arguments: Sequence[str], limit_s: float, env: Mapping[str, str]) -> str:
    """Run an experiment for at most ``limit_s`` and return why it failed. Empty: it ended well."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.launch", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | dict(env),
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return f"did not end within {limit_s:.0f} s"
        finally:
            stop(process)
        errors.seek(0)
        told = [line for line in errors.read().splitlines() if line.strip()]
    if not process.returncode:
        return ""
    return f"{describe_exit(process.returncode)}: {told[-1][:300] if told else 'no message'}"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, and its roles with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def one_device(env: Mapping[str, str]) -> dict[str, str]:
    """The first of the devices that this process may use."""
    return {"CUDA_VISIBLE_DEVICES": env.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]}


def find_machine(accelerator: str, timeout_s: float) -> tuple[Machine | None, Facts]:
    """The machine and the facts of its imports. None: it cannot be checked, for the reason in the facts."""
    facts = trial("machine", accelerator, timeout_s)
    return (msgspec.convert(facts["machine"], Machine) if facts.get("machine") else None), facts


def trial_model(machine: Machine, folder: Path, timeout_s: float) -> tuple[Path, str]:
    """The model with random weights, and why it could not be made (empty: it was)."""
    path = folder.parent / "trial_model"
    if path.exists():
        return path, ""
    job = {
        "folder": str(path),
        "accelerator": machine.accelerator,
        "shape": msgspec.to_builtins(machine.shape),
    }
    return path, trial("trial_model", job, timeout_s)["problem"]


def trainer_facts(tokens_of: Callable[[Machine], int]) -> Callable[[Machine, Path, float], Facts]:
    """The facts of a trainer with one length of micro-batches."""

    def facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
        model, problem = trial_model(machine, folder, limit_s)
        if problem:
            return {"problem": f"the model with random weights was not made: {problem}"}
        tokens = tokens_of(machine)
        overrides = ["finetune.engine=ddp", f"finetune.seq_length={tokens}", f"finetune.head_chunk_tokens={HEAD_CHUNK}"]
        overrides += ["finetune.share_prefixes=off"]  # the made-up documents have nothing in common
        overrides += ["finetune.gradient_checkpointing=true"]  # what the predicted speed assumes
        job = {"model": str(model), "tokens": tokens, "accelerator": machine.accelerator, "overrides": overrides}
        return trial("trainer_trial", job, limit_s)

    return facts


def experiment(
    name: str,
    machine: Machine,
    run_dir: Path,
    options: Sequence[str],
    limit_s: float,
    env: Mapping[str, str],
    config_name: str = "quickstart",
) -> Facts:
    """Run an experiment with these options. Returns facts of its folder and the peak memory of its device."""
    arguments = [f"--config-name={config_name}", f"output_dir={quoted(str(run_dir))}", *machine.run_options, *options]
    before = max(gpu_used_bytes(), default=0)
    peak, over = [before], threading.Event()

    def look() -> None:
        while not over.wait(LOOK_S):
            peak[0] = max(peak[0], *gpu_used_bytes(), 0)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        problem = launch(arguments, limit_s, one_device(os.environ) | dict(env))
    finally:
        over.set()
        looking.join()
    if problem:
        logs = {path.parent.name: path for path in sorted(run_dir.glob("*/log.txt"))}
        problem += "".join(
            f"; {job}: {last_error_line(path)[:200]}" for job, path in logs.items() if path.stat().st_size
        )
    measured = None if machine.is_rehearsal else peak[0] - before
    return {"name": name, "problem": problem, "device_bytes": measured, **run_facts(run_dir)}


def quickstart_facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
    """The quickstart as it is. A rehearsal stops early, before it has learned."""
    steps = 12 if machine.is_rehearsal else LEARNING_STEPS
    return experiment("quickstart", machine, folder / "run", [f"finetune.max_train_steps={steps}"], limit_s, {})


def other_runner_facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
    """The beginning of the quickstart with vLLM's first model runner, which the default replaced."""
    env = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    steps = 4 if machine.is_rehearsal else UPDATES
    options = [f"finetune.max_train_steps={steps}", "eval.at_start=false", "eval.at_end=false"]
    return experiment("model runner V1", machine, folder / "run", options, limit_s, env)


def words_facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
    """The beginning of the recipe `words` with the pretrained model."""
    if not machine.model:
        return {"not_run": "needs a pretrained model: make smollm2, then --model models/SmolLM2-135M-Instruct"}
    steps = 1 if machine.is_rehearsal else WORDS_STEPS
    options = [f"model_path={quoted(machine.model)}", f"finetune.max_train_steps={steps}"]
    options += ["eval.at_end=false"] * machine.is_rehearsal
    return experiment("words", machine, folder / "run", options, limit_s, {}, "words")


def served_model(machine: Machine, folder: Path, limit_s: float) -> tuple[Path, ModelShape | None, str]:
    """The given model or the one with random weights, its shape, and why there is none (empty: there is)."""
    if not machine.model:
        path, problem = trial_model(machine, folder, limit_s)
        return path, machine.shape, problem
    shape = find_model_shape(machine.model)
    return Path(machine.model), shape, "" if shape else f"{machine.model} has no config.json of a known form"


def serving_facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
    """A run that trains the entropy bonus alone: random weights with answers of one length, or the given model."""
    model, shape, problem = served_model(machine, folder, limit_s)
    if problem or shape is None:
        return {"problem": f"no model to serve: {problem}"}
    length, rollouts = (16, 32) if machine.is_rehearsal else (512, 256)
    run_dir = folder / "run"
    sampling = f"{{max_tokens: {length}, temperature: 1.0}}"
    options = [
        *(
            f"model_path={quoted(str(model))}",
            "tiny_model=null",
            f"llm.parameters={sampling}",
            f"test_llm.parameters={sampling}",
        ),
        *(f"actor.llm_max_rollouts={rollouts}", f"finetune.max_train_steps={UPDATES}", "finetune.seq_length=4096"),
        *("eval.at_start=false", "eval.at_end=false", "finetune.rl.entropy_bonus=0.01"),
        *("finetune.learning_rate=1e-6", "vllm_config.vllm_kwargs.max_model_len=1024", "weights.timeout_s=120"),
    ]
    facts = dict(experiment("serving", machine, run_dir, options, limit_s, {}))
    if facts["problem"]:
        return facts
    cfg = load_run(run_dir)
    known = find_gpu(machine.name)
    gpu = None if known is None else GPUS[known]
    # a real model ends its answers by itself, so a server has fewer at a time than the prediction
    decoding = server_speed(cfg, shape, gpu, 1, machine.memory_bytes) if gpu and not machine.model else None
    chosen = with_choices(cfg, shape, 1, machine.memory_bytes)
    trainer = sum(item.num_bytes for item in trainer_items(chosen, shape, 1))
    return facts | {
        "predicted_per_s": None if decoding is None else decoding.tokens_per_s / 2,
        "planned_pause_ms": 1e3 * predicted_pause_s(cfg, shape, gpu, 1, machine.memory_bytes) if gpu else None,
        "planned_device_bytes": int(utilization(cfg) * machine.memory_bytes) + trainer,
    }


def communicator_facts(machine: Machine, folder: Path, limit_s: float) -> Facts:
    """Two processes on two cards."""
    jobs = [{"rank": rank, "meeting": str(folder / "meeting")} for rank in (0, 1)]
    second = threading.Thread(target=trial, args=("communicator_trial", jobs[1], limit_s))
    second.start()
    first = trial("communicator_trial", jobs[0], limit_s)
    second.join()
    return first


CHECKS = (
    GpuCheck("trainer, short", 90, trainer_facts(lambda machine: machine.trained_lengths[0]), verdicts.judge_trainer),
    GpuCheck("trainer, long", 90, trainer_facts(lambda machine: machine.trained_lengths[1]), verdicts.judge_trainer),
    GpuCheck("quickstart", 200, quickstart_facts, verdicts.judge_quickstart),
    GpuCheck("serving", 200, serving_facts, verdicts.judge_serving),
    GpuCheck("model runner V1", 150, other_runner_facts, verdicts.judge_quickstart),
    GpuCheck("words", 300, words_facts, verdicts.judge_words),
    GpuCheck("communicators", 60, communicator_facts, verdicts.judge_communicators, needs_devices=2),
)
"""In the order in which they are run: what shows most in the least time comes first."""
