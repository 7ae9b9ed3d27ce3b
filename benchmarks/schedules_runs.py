"""One run of `schedules.py`: the project's own roles around an inference server that stays up from run to run.

Owns the processes. Server, actor, preprocessor and trainer are those that the launcher starts, with its configuration,
world map, environment and core pinning; what differs is that they are forked from a process that has imported
everything, and that the server is started once: a run takes seconds to start instead of half a minute. The trainer
also keeps, in memory, the time of each optimizer step and every few steps the weights.
"""

import asyncio
import atexit
import contextlib
import json
import math
import multiprocessing
import multiprocessing.util
import os
import random
import secrets
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec
from omegaconf import OmegaConf

from benchmarks.schedules_task import FIRST_REQUEST, MAX_NUMBER, WIDTH, build_model, question, success_of
from pipelinerl.config.environment import SECRET_VARIABLE
from pipelinerl.config.load import compose, parse_container, to_container
from pipelinerl.config.paths import RUN_CONFIG
from pipelinerl.inspect.balance import balance_of
from pipelinerl.inspect.series import Series
from pipelinerl.launcher.commands import inherited_environment, role_command
from pipelinerl.observability.metrics import read_metrics
from pipelinerl.world import Job, WorldMap, build_world

DEVICE_KINDS = ("actor_llm", "finetune")
"""Each has a core to itself, as each has its devices on GPUs; actor and preprocessor run where there is room."""
SNAPSHOT_EVERY = 2
SERVER_UP_S, RUN_S, STOP_S = 600.0, 1200.0, 60.0
ATTEMPTS = 4
"""As in schedules.yaml."""
BESIDE_S, PACK = 5.0, 384
"""Seconds of a training core's work beside a server's, and tokens of each of its passes."""

fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What to run."""

    lengths: str
    steps: int
    overrides: tuple[str, ...]
    seed: int
    filler: int = 0
    """Further tokens of each prompt."""


def write_run(run: Run, model: Path, folder: Path, server: Job | None = None) -> WorldMap:
    """The run folder that the launcher would write; its server is the one that is up."""
    overrides = [
        f"output_dir={folder}",
        f"model_path={model}",
        f"seed={run.seed}",
        f"dataset_loader_params={{lengths: {run.lengths}, filler: {run.filler}}}",
        f"finetune.max_train_steps={run.steps}",
        *run.overrides,
    ]
    container = to_container(compose("schedules", overrides, Path(__file__).parent))
    world = build_world(parse_container(container), os.environ)
    if server is not None:
        jobs = tuple(server if job.name == server.name else job for job in world.jobs)
        world = msgspec.structs.replace(world, jobs=jobs)
    (folder / RUN_CONFIG).parent.mkdir(parents=True)
    OmegaConf.save(OmegaConf.create(container), folder / RUN_CONFIG)
    world.save(folder)
    return world


class Roles:
    """Processes of one folder; ends them when the block ends, however it ends."""

    def __init__(self, folder: Path, world: WorldMap):
        self.folder, self.world = folder, world
        self.processes: dict[str, Any] = {}

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes.values():
            if process.is_alive():
                process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in self.processes.values():
            process.join(max(deadline - time.monotonic(), 0.1))
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()

    def start(self, job: Job, main: Callable[[Any], None]) -> None:
        env = role_command(job, self.world, self.folder, os.environ).env
        process = fork.Process(target=be_role, args=(main, self.folder, job, env))
        process.start()
        self.processes[job.name] = process

    def wait(self, name: str, timeout_s: float) -> None:
        """Until the process ends; an error of any of them is an error here."""
        deadline = time.monotonic() + timeout_s
        while self.processes[name].is_alive():
            failed = [n for n, p in self.processes.items() if p.exitcode]
            assert not failed, "\n".join((self.folder / f"{one}.log").read_text()[-3000:] for one in failed)
            assert time.monotonic() < deadline, f"{name} did not end within {timeout_s} s, see {self.folder}/*.log"
            time.sleep(0.2)
        assert self.processes[name].exitcode == 0, f"{name} failed, see {self.folder}/{name}.log"


def be_role(main: Callable[[Any], None], folder: Path, job: Job, env: Mapping[str, str]) -> None:
    """In the child: what the launcher and Python's start do for a role."""
    from pipelinerl.membership.role import run_role

    log = os.open(folder / f"{job.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(env)
    os.sched_setaffinity(0, job.cores if job.kind in DEVICE_KINDS else range(os.cpu_count() or 1))
    atexit._clear()  # what the parent does at its end, as removing the folder, is not this process's to do
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    sys.argv = [job.name, "--run-dir", str(folder), "--job", job.name]
    run_role(main)


def preload() -> None:
    """Import what the roles need, so that a forked role need not. Starts no thread."""
    import torch
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen2.tokenization_qwen2  # noqa: F401

    import pipelinerl.actor.role
    import pipelinerl.finetune.loop
    import pipelinerl.preprocess.loop
    import pipelinerl.weights.publish.sender  # noqa: F401

    torch.set_num_threads(1)


def ensure_model(folder: Path, width: int = WIDTH) -> Path:
    """The task's model, built if the folder does not exist."""
    if not folder.exists():
        in_child(build_model, folder, width, 0)
    return folder


@contextlib.contextmanager
def running_server(model: Path, folder: Path) -> Iterator[Job]:
    """A vLLM server on the first core. Its folder's world has the trainer's job."""
    from pipelinerl.inference.__main__ import main

    os.environ.setdefault(SECRET_VARIABLE, secrets.token_hex(16))
    world = write_run(Run(lengths="heavy", steps=1, overrides=(), seed=0), model, folder)
    (job,) = world.get("actor_llm")
    with Roles(folder, world) as roles:
        roles.start(job, main)
        deadline = time.monotonic() + SERVER_UP_S
        while not answers(job):
            assert roles.processes[job.name].is_alive(), f"the server failed, see {folder}"
            assert time.monotonic() < deadline, f"the server did not start, see {folder}"
            time.sleep(0.5)
        yield job


def answers(job: Job) -> bool:
    try:
        with urllib.request.urlopen(f"{job.url}/weight_info", timeout=5):
            return True
    except OSError:
        return False


def train_recorded(ctx: Any) -> None:
    """The trainer's role, which also keeps a timeline and snapshots of the weights."""
    import torch

    from pipelinerl.finetune.export import exported_parameters
    from pipelinerl.finetune.loop import Trainer, connect_weights
    from pipelinerl.finetune.model import DTYPES

    class Recorded(Trainer):
        def run(self, *, stay: bool = False) -> None:
            self.times: list[float] = []
            self.busy: list[list[float]] = []
            self.snapshots: dict[int, dict[str, torch.Tensor]] = {}
            super().run(stay=stay)

        def advance(self) -> bool:
            if not super().advance():
                return False
            self.times.append(time.time())
            self.busy.append(core_times())
            if self.counters.step % SNAPSHOT_EVERY == 0:
                exported = exported_parameters(self.engine, DTYPES[self.cfg.finetune.dtype])
                self.snapshots[self.counters.step] = {name: tensor.detach().clone() for name, tensor in exported}
            return True

    trainer = Recorded(ctx, connect_weights)
    trainer.run()
    torch.save(trainer.snapshots, ctx.run_dir / "snapshots.pt")
    recorded = {"times": trainer.times, "busy": trainer.busy}
    (ctx.run_dir / "timeline.json").write_text(json.dumps(recorded))


def core_times() -> list[float]:
    """CPU seconds that each core has worked since it was switched on."""
    lines = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line[:4] not in ("cpu ", "intr")]
    ticks = os.sysconf("SC_CLK_TCK")
    return [
        (sum(map(int, fields[1:9])) - int(fields[4]) - int(fields[5])) / ticks
        for fields in lines
        if fields[0].startswith("cpu")
    ]


def execute(run: Run, model: Path, folder: Path, server: Job, train: Callable[[Any], None] = train_recorded) -> None:
    """Train one run to its end. ``train``: the trainer's role."""
    from pipelinerl.actor.role import run as act
    from pipelinerl.preprocess.loop import run as preprocess

    world = write_run(run, model, folder, server)
    with Roles(folder, world) as roles:
        (trainer,) = world.get("finetune")
        roles.start(trainer, train)
        for kind, main in (("actor", act), ("preprocessor", preprocess)):
            roles.start(world.get(kind)[0], main)
        roles.wait("finetune_0", RUN_S)
        roles.wait("actor_0", STOP_S)


def measured(run: Run, model: Path, folder: Path) -> dict[str, Any]:
    """What a finished run recorded, in seconds from its first request on; scores its snapshots."""
    timeline = json.loads((folder / "timeline.json").read_text())
    started = float((folder / FIRST_REQUEST).read_text())
    points = [point for point in read_metrics(folder, "finetune") if point["step"] <= run.steps]
    success = in_child(score, model, folder)
    balance = balance_of(Series(finetune=points, actor=read_metrics(folder, "actor")))
    return {
        "step_ends_s": [round(t - started, 4) for t in timeline["times"]],
        "success": {int(step): round(value, 4) for step, value in success.items()},
        "tokens": [point["tokens"] for point in points],
        "step_s": [round(point["step_s"], 4) for point in points],
        "wait_s": [round(point["wait_s"], 4) for point in points],
        "pause_ms": [round(point["pause_ms"], 2) for point in points],
        "lag_mean": round(sum(point["lag_mean"] for point in points) / len(points), 3),
        "lag_max": max(point["lag_max"] for point in points),
        "core_busy_s": timeline["busy"],
        "trainer_waits": None if balance is None else round(balance.trainer_waits.mean, 3),
        "slots_held": None if balance is None else round(balance.slots_held.mean, 3),
    }


def score(model: Path, folder: Path) -> dict[int, float]:
    import torch
    from safetensors.torch import load_file

    snapshots = torch.load(folder / "snapshots.pt")
    return success_of(model, {0: load_file(model / "model.safetensors"), **snapshots}, threads=os.cpu_count() or 1)


class Child:
    """A function in a process of its own: this one must stay without threads."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self._ours, theirs = fork.Pipe(duplex=False)
        self._process = fork.Process(target=lambda: theirs.send(function(*args)))
        self._process.start()
        theirs.close()

    def result(self) -> Any:
        try:
            return self._ours.recv()
        finally:
            self._process.join()


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    return Child(function, *args).result()


def slowdown_together(server: Job, trainer: Job, model: Path, height: int, num_tokens: int) -> dict[str, float]:
    """How much slower each core decodes or trains while the other one works, than alone.

    Two cores share caches, memory, and on some machines one core's arithmetic units. Nothing of the project runs.
    """
    decoding = (decoding_rates, server, model, (height,), num_tokens)
    decode, train = in_child(*decoding, 3)[height], in_child(training_rate, trainer, model, BESIDE_S / 2)
    beside = Child(training_rate, trainer, model, BESIDE_S)
    both = in_child(*decoding, math.ceil(BESIDE_S * decode / (height * num_tokens)))[height]
    return {"decode": round(decode / both, 3), "train": round(train / beside.result(), 3)}


def training_rate(trainer: Job, model: Path, seconds: float) -> float:
    """Forward and backward passes per second over one pack, on the trainer's core."""
    import torch
    from transformers import AutoModelForCausalLM

    os.sched_setaffinity(0, trainer.cores)
    torch.set_num_threads(1)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ids_BL = torch.arange(PACK)[None] % policy.config.vocab_size
    passes, started = -1, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        policy(input_ids=ids_BL, labels=ids_BL).loss.backward()
        passes += 1
        started = time.perf_counter() if passes == 0 else started  # the first one is not counted
    return passes / elapsed


def decoding_rates(
    server: Job, model: Path, heights: Sequence[int], num_tokens: int, repeats: int, filler: int = 0
) -> dict[int, float]:
    """Tokens/s of one server with so many completions at a time, from the first request to the last answer.

    As in a run, every ``ATTEMPTS`` of them have a prompt in common that the server has not seen.
    """
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - set(server.cores))
    prompts = new_prompts(model, filler)
    rates = {}
    for height in heights:
        asked = [[next(prompts) for _ in range(-(-height // ATTEMPTS))] for _ in range(repeats + 1)]
        times = [asyncio.run(generate(server.url, groups, height, num_tokens)) for groups in asked][1:]
        rates[height] = height * num_tokens * len(times) / sum(times)
    return rates


def new_prompts(model: Path, filler: int = 0) -> Iterator[list[int]]:
    """The tokens of prompts in a random order."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    triples = list(permutations(range(1, MAX_NUMBER + 1), 3))
    random.Random(0).shuffle(triples)
    for numbers in triples:
        asked = [{"role": "user", "content": question(numbers, filler)}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        yield tokenizer.encode(prompt, add_special_tokens=False)


def prompt_length(model: Path) -> int:
    """Tokens of a prompt without filler."""
    return len(next(new_prompts(model)))


async def generate(url: str, groups: Sequence[list[int]], height: int, num_tokens: int) -> float:
    """Seconds for ``height`` completions of ``num_tokens`` tokens, asked for as the actor asks."""
    import aiohttp

    sampling = {"max_tokens": num_tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    async with aiohttp.ClientSession() as session:

        async def one(prompt: list[int]) -> None:
            body = {"model": "policy", "token_ids": prompt, "sampling_params": sampling}
            async with session.post(f"{url}/inference/v1/generate", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()

        started = time.perf_counter()
        await asyncio.gather(*(one(groups[place // ATTEMPTS]) for place in range(height)))
        return time.perf_counter() - started


def environment() -> None:
    """Variables that every process of the benchmark needs before torch is imported."""
    inherited = inherited_environment(os.environ)
    os.environ.clear()
    os.environ.update(inherited, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
