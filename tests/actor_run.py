"""The actor role of a run folder, with fake servers; the test plays trainer and preprocessor."""

import asyncio
import contextlib
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipelinerl.actor.role import run
from pipelinerl.config.load import compose, load_run
from pipelinerl.membership.role import RoleContext
from pipelinerl.records import (
    ActorRecord,
    EvaluationDone,
    EvaluationStarted,
    GroupDropped,
    PreprocessorProgress,
    RolloutGroup,
    TrainerMessage,
    WeightUpdateSuccess,
    topics,
)
from pipelinerl.records.messages import EvaluationMessage
from pipelinerl.streams import SingleStreamSpec, backend_from_config, open_reader, open_writer
from pipelinerl.testing import FakeServer, byte_tokenizer, save_tokenizer
from pipelinerl.world import Job, WorldMap
from pipelinerl.world.cluster import Node
from tests.scripted_actor import QuietStatus

TOKENIZER = byte_tokenizer()
BATCH = 8
ATTEMPTS = 4


def answer_largest(prompt_ids: list[int], params: dict[str, Any], index: int) -> list[int]:
    """Right for the first completion of a request, wrong for the others."""
    numbers = [int(number) for number in re.findall(r"\d+", TOKENIZER.decode(prompt_ids))]
    text = f"<answer>{max(numbers) if index == 0 else min(numbers)}</answer>"
    return [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]


@dataclass
class Run:
    """A run folder with an actor in it; the test plays trainer and preprocessor."""

    run_dir: Path
    servers: list[FakeServer]
    stop: threading.Event = field(default_factory=threading.Event)
    task: asyncio.Task | None = None

    def start(self) -> None:
        """Runs the actor in a thread."""
        self.open()
        self.begin()

    def start_process(self, open_files: int | None = None) -> None:
        """Runs the actor as the launcher does, with a hard limit on its open files."""
        self.open()
        self.task = asyncio.create_task(self._role(open_files))

    async def _role(self, open_files: int | None) -> None:
        limit = [] if open_files is None else ["prlimit", f"--nofile={open_files // 2}:{open_files}", "--"]
        command = [*limit, sys.executable, "-m", "pipelinerl.actor", "--run-dir", str(self.run_dir), "--job", "actor_0"]
        with open(self.run_dir / "actor.log", "wb") as log:  # noqa: ASYNC230
            process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
        try:
            while process.returncode is None and not self.stop.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 0.1)
        finally:
            if process.returncode is None:
                process.terminate()
        assert await process.wait() == 0, self.log()[-4000:]

    def log(self) -> str:
        return (self.run_dir / "actor.log").read_text(errors="replace")

    def open(self) -> None:
        cfg = load_run(self.run_dir)
        backend_from_config(cfg, self.run_dir)
        self.trainer = open_writer(SingleStreamSpec(self.run_dir, topics.TRAINER), TrainerMessage)
        self.preprocessor = open_writer(SingleStreamSpec(self.run_dir, topics.PREPROCESSOR), PreprocessorProgress)
        self.actor = open_reader(SingleStreamSpec(self.run_dir, topics.ACTOR), ActorRecord, name="test")
        self.evaluation_topic = open_reader(
            SingleStreamSpec(self.run_dir, topics.EVALUATION), EvaluationMessage, name="test"
        )
        self.records: list[RolloutGroup | GroupDropped] = []
        self.evaluations: list[EvaluationStarted | EvaluationDone] = []

    def begin(self) -> None:
        world = WorldMap.load(self.run_dir)
        context = RoleContext(
            run_dir=self.run_dir,
            job=world.job("actor_0"),
            cfg=load_run(self.run_dir),
            world=world,
            status=QuietStatus(),  # type: ignore[arg-type]
            stop=self.stop,
        )
        self.task = asyncio.create_task(asyncio.to_thread(run, context))

    def update(self, version: int, *servers: int) -> None:
        names = tuple(f"actor_llm_{i}" for i in (servers or range(len(self.servers))))
        for server in self.servers:
            server.version = version
        self.trainer.write(WeightUpdateSuccess(version=version, servers=names))

    def dropped(self, samples: int) -> None:
        self.preprocessor.write(
            PreprocessorProgress(samples_packed=0, samples_dropped=samples, dropped_by_reason={}, step=0)
        )

    def read(self) -> None:
        self.records += [record for _, record in self.actor.read_all()]
        self.evaluations += [record for _, record in self.evaluation_topic.read_all()]

    async def until(self, condition: Callable[[], bool], timeout_s: float = 200.0) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            self.read()
            if condition():
                return
            assert self.task is not None
            if self.task.done():
                self.task.result()
                raise AssertionError("the actor ended early")
            assert time.monotonic() < deadline, (self.records, self.evaluations)
            await asyncio.sleep(0.02)

    async def ended(self, timeout_s: float = 200.0) -> None:
        assert self.task is not None
        await asyncio.wait_for(self.task, timeout_s)
        self.read()

    async def close(self) -> None:
        self.stop.set()
        if self.task is not None and not self.task.done():
            await asyncio.wait([self.task], timeout=60)
        for stream in (self.trainer, self.preprocessor, self.actor, self.evaluation_topic):
            stream.close()


@contextlib.asynccontextmanager
async def make_runs(run_dir: Path) -> AsyncIterator[Callable[..., Any]]:
    """A function that writes a run folder with fake servers around an actor; ends what was started."""
    runs: list[Run] = []

    async def make(
        *overrides: str, servers: int = 1, answer: Callable = answer_largest, fakes: Iterable[FakeServer] = ()
    ) -> Run:
        running = list(fakes) or [FakeServer(answer) for _ in range(servers)]
        for fake in running:
            await fake.start()
        save_tokenizer(run_dir / "model", TOKENIZER)
        write_config(run_dir, overrides)
        write_world(run_dir, [fake.url for fake in running])
        result = Run(run_dir, running)
        runs.append(result)
        return result

    yield make
    for started in runs:
        if started.task is not None:
            await started.close()
        for fake in started.servers:
            await fake.stop()


def write_world(run_dir: Path, urls: list[str]) -> None:
    """A world map of one actor and one trainer around servers that somebody else runs."""
    jobs = [Job(name=f"actor_llm_{i}", kind="actor_llm", replica_idx=i, url=url) for i, url in enumerate(urls)]
    WorldMap(
        accelerator="cpu",
        nodes=(Node(rank=0, hostname="127.0.0.1", devices=1, cores=(0,)),),
        jobs=(Job(name="actor_0", kind="actor"), *jobs, Job(name="finetune_0", kind="finetune")),
        master_port=1,
        weight_port=2,
        weight_ports=1,
    ).save(run_dir)


def write_config(run_dir: Path, overrides: tuple[str, ...]) -> None:
    base = [
        f"output_dir={run_dir}",
        f"model_path={run_dir / 'model'}",
        "dataset_loader=pipelinerl.domains.largest.load_problems",
        "++dataset_loader_params.max_number=12",
        "++dataset_loader_params.num_test_problems=6",
        "actor.rollout_policy=pipelinerl.domains.largest.generate_rollout",
        f"attempts={ATTEMPTS}",
        f"finetune.gradient_accumulation_passes={BATCH}",
        "actor.llm_max_rollouts=16",
        "wandb.mode=disabled",
        "eval_every_n_versions=0",
        "eval.at_start=false",
        "eval.at_end=false",
        "max_lag_steps=1",
        "finetune.max_train_steps=10",
        "llm.parameters.max_tokens=64",
        "test_llm.parameters.max_tokens=64",
    ]
    cfg = compose("base", [*base, *overrides])
    container = OmegaConf.to_container(cfg, resolve=True)
    container.pop("hydra", None)  # type: ignore[call-arg]
    (run_dir / "conf").mkdir(exist_ok=True)
    OmegaConf.save(OmegaConf.create(container), run_dir / "conf" / "config.yaml")
