"""Servers for tests: a real vLLM server of a tiny random model, started as the launcher would, and one without vLLM."""

import asyncio
import fcntl
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import uvicorn
from fastapi import FastAPI
from omegaconf import OmegaConf

from pipelinerl.config.load import compose
from pipelinerl.inference.access import RouteAccess
from pipelinerl.inference.weight_update import UpdateControl, control_router
from pipelinerl.weights.layout import Layout
from pipelinerl.weights.load.store_follower import StoreFollower
from pipelinerl.weights.transfer.receiver import Receiver
from pipelinerl.world import Job, WorldMap
from tests.ports import free_port
from tests.sender_kit import weights_section

START_S, STOP_S = 600.0, 180.0
"""Importing vLLM takes half a minute alone, and ten times as long on a busy machine."""
VOCAB = 256
LOCKS = "/tmp/pipelinerl-vllm.{}.lock"
"""One for each core, and one that is held by who gathers cores."""


@dataclass(frozen=True)
class RunningServer:
    """A server process and what a trainer needs to know about it."""

    run_dir: Path
    job: Job
    process: subprocess.Popen[bytes]
    secret: str

    def log(self) -> str:
        return (self.run_dir / "server.log").read_text(errors="replace")


def build_model(path: Path, *, hidden: int = 128, layers: int = 4, vocab: int = VOCAB, tied: bool = True) -> Path:
    """Random Qwen2 with a byte tokenizer; about 1M parameters by default."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(path)
    save_byte_tokenizer(path)
    return path


def save_byte_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0])
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(path)


def write_run(
    run_dir: Path, model: Path, cores: tuple[int, ...], *, kind: str = "actor_llm", overrides: tuple[str, ...] = ()
) -> Job:
    """The run folder that a launcher would have written, with one server."""
    cfg = compose(
        "base",
        [
            f"output_dir={run_dir}",
            f"model_path={model}",
            "dataset_loader=pipelinerl.domains.largest.load_problems",
            "actor.rollout_policy=pipelinerl.domains.largest.generate_rollout",
            "world.accelerator=cpu",
            "actor.llm_max_rollouts=64",  # requests beyond them wait in the server
            "vllm_config.vllm_kwargs.dtype=float32",
            "vllm_config.vllm_kwargs.max_model_len=2048",
            "vllm_config.vllm_kwargs.max-num-batched-tokens=4096",
            *overrides,
        ],
    )
    (run_dir / "conf").mkdir(parents=True, exist_ok=True)
    OmegaConf.save(cfg, run_dir / "conf" / "config.yaml", resolve=True)
    port = free_port()
    job = Job(name=f"{kind}_0", kind=kind, port=port, cores=cores, url=f"http://127.0.0.1:{port}")
    fields = {
        "accelerator": "cpu",
        "nodes": [{"rank": 0, "hostname": "127.0.0.1", "devices": 2}],
        "jobs": [msgspec.to_builtins(job), {"name": "finetune_0", "kind": "finetune"}],
    }
    ports = ("master_port", "weight_port", "weight_ports")
    world = msgspec.convert(fields | dict.fromkeys(ports, 0), WorldMap)
    world.save(run_dir)
    return job


@contextmanager
def running_server(
    run_dir: Path,
    model: Path,
    *,
    kind: str = "actor_llm",
    overrides: tuple[str, ...] = (),
    num_cores: int = 1,
    start_s: float = START_S,
) -> Iterator[RunningServer]:
    """Start, wait until it answers, stop with SIGTERM and require exit code 0."""
    with own_cores(num_cores) as cores:
        job = write_run(run_dir, model, cores, kind=kind, overrides=overrides)
        server = start_server(run_dir, job)
        try:
            wait_until_up(server, start_s)
            yield server
        finally:
            server.process.send_signal(signal.SIGTERM)
            try:
                code = server.process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(server.process.pid, signal.SIGKILL)
                server.process.wait()
                code = None
        assert code == 0, f"exit code {code} after SIGTERM:\n{server.log()[-3000:]}"


@contextmanager
def own_cores(number: int = 1) -> Iterator[tuple[int, ...]]:
    """Waits for cores on which no other test process has a server."""
    cores, all_cores = list[int](), os.sched_getaffinity(0)
    with ExitStack() as held:
        with locked("turn"):
            while len(cores) < min(number, len(all_cores)):
                for core in sorted(all_cores - {*cores}):
                    with suppress(BlockingIOError):
                        held.enter_context(locked(core, fcntl.LOCK_NB))
                        cores.append(core)
                        break
                else:
                    time.sleep(0.02)
        yield tuple(cores)


@contextmanager
def locked(name: str | int, how: int = 0) -> Iterator[None]:
    with open(LOCKS.format(name), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | how)
        yield


def start_server(run_dir: Path, job: Job, secret: str | None = None) -> RunningServer:
    secret = secret or secrets.token_hex(16)
    with open(run_dir / "server.log", "ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.inference", "--run-dir", str(run_dir), "--job", job.name],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PIPELINERL_SECRET": secret},
            start_new_session=True,
        )
    return RunningServer(run_dir=run_dir, job=job, process=process, secret=secret)


def wait_until_up(server: RunningServer, start_s: float = START_S) -> None:
    def answers() -> bool:
        assert server.process.poll() is None, f"the server ended:\n{server.log()[-3000:]}"
        try:
            with urllib.request.urlopen(f"{server.job.url}/weight_info", timeout=5) as response:
                return bool(msgspec.json.decode(response.read()))
        except OSError:
            return False

    wait_for(answers, start_s, lambda: f"the server did not answer:\n{server.log()[-3000:]}")


def wait_for(condition: Callable[[], bool], timeout_s: float, message: Callable[[], str]) -> None:
    """Poll a condition until it holds or the deadline fails the test."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(0.02)


@pytest.fixture(scope="session")
def serving() -> SimpleNamespace:
    """The helpers of this file, for tests that start and end servers themselves."""
    return SimpleNamespace(
        own_cores=own_cores,
        write_run=write_run,
        start=start_server,
        running=running_server,
        wait_until_up=wait_until_up,
        wait_for=wait_for,
        save_byte_tokenizer=save_byte_tokenizer,
    )


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model") / "qwen2")


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, tiny_qwen2: Path) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("run"), tiny_qwen2) as server:
        yield server


SECRET = "unit-test-secret"


class Following:
    """What a server fetches from a store."""

    def __init__(self, updates: UpdateControl):
        self._updates = updates
        self.loop: Any = None
        self.follower: StoreFollower | None = None

    def follow(self, url: str) -> StoreFollower:
        """Begin to fetch versions from the store at ``url``."""
        weights = weights_section(store_poll_s=0.02, bucket_mb=1 / 64, timeout_s=60.0, stall_s=5.0)
        self.follower = StoreFollower(self._updates, self.loop, weights, url=url, secret=SECRET)
        self.follower.start()
        return self.follower

    def stop(self) -> None:
        if self.follower is not None:
            self.follower.close()
            self.follower.join()


class ModelServer:
    """A server without vLLM: real HTTP, connections and receiver; records swaps and what is live."""

    def __init__(self, name: str = "actor_llm_0", refuse: Callable[[Layout], None] | None = None):
        self.live: dict[str, torch.Tensor] = {}
        self.label = "default"
        self.swaps = 0
        self.fatal = 0
        self._refuse = refuse or (lambda layout: None)
        self.receiver = Receiver(
            index=0,
            host="127.0.0.1",
            secret=SECRET,
            device=torch.device("cpu"),
            allocate=self._allocate,
            prepare=lambda layout, _: self._refuse(layout),
        )
        app = FastAPI()
        updates = UpdateControl(self, workers=[self.receiver.address], secret=SECRET, on_fatal=self._on_fatal)
        app.include_router(control_router(updates))
        app.add_middleware(RouteAccess)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self.store = Following(updates)
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),), daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started, 60, lambda: "uvicorn did not start")
        self.port = self._server.servers[0].sockets[0].getsockname()[1]
        kind, _, number = name.rpartition("_")
        self.job = Job(
            name=name, kind=kind, replica_idx=int(number), port=self.port, url=f"http://127.0.0.1:{self.port}"
        )

    async def _serve(self) -> None:
        self.store.loop = asyncio.get_running_loop()
        await self._server.serve()

    @staticmethod
    def _allocate(num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def _on_fatal(self) -> None:
        self.fatal += 1

    async def call_workers(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self, method)(*args)]

    async def swap(self, version: int) -> tuple[float, float]:
        layout, buffer = self.receiver.staged(version)
        self.live = {name: tensor.clone() for name, tensor in layout.views(buffer)}
        self.swaps += 1
        self.label = str(version)
        return 0.0, 0.0

    async def version(self) -> str:
        return self.label

    def stop(self) -> None:
        self.store.stop()
        self._server.should_exit = True
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        self.receiver.close()


@pytest.fixture
def start_model_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModelServer]]:
    monkeypatch.setenv("PIPELINERL_SECRET", SECRET)
    servers: list[ModelServer] = []

    def start(*args: Any, **kwargs: Any) -> ModelServer:
        servers.append(ModelServer(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
