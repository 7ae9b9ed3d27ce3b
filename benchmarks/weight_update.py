"""Stall of decoding per weight update against model size, beside an update that moves one tensor at a time.

    python -m benchmarks.weight_update --json benchmarks/weight_update.json
    python -m benchmarks.weight_update --accelerator cuda --sizes 0.5B 7B --bucket-mb 8 32 128
    python -m benchmarks.weight_update --accelerator cuda --sizes 7B --bucket-mb 128 --alone

For each size a real vLLM server decodes under load while its weights change. *Staged* is the project's update: bytes
arrive in the background; the pause waits for the decoding step under way and covers the swap. *One by one* pauses,
pulls and loads every tensor by itself, then resumes, on the same server, over the same kind of connection.

With `--accelerator cuda` trainer and server share one GPU, the model is bfloat16, and buckets go over CUDA IPC. One by
one is left out there: it goes through host memory, so it would lose for another reason. With `--alone` the server has
the GPU for itself at utilization 0.9: updates come over TCP and are staged in page-locked host memory if the GPU has no
room, and the rate of decoding is measured for several numbers of sequences.
"""

import argparse
import contextlib
import json
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import torch
from omegaconf import OmegaConf

from benchmarks.provenance import machine
from pipelinerl.config.load import compose, load_run
from pipelinerl.launcher.commands import role_environment
from pipelinerl.plan.model_shape import PUBLISHED_SHAPES, ModelShape
from pipelinerl.plan.speed import gpu_named, predicted_pause_s
from pipelinerl.weights.layout import spec_of
from pipelinerl.weights.publish.sender import WeightSender
from pipelinerl.weights.publish.servers import UpdateOutcome
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.source import SourceServer
from pipelinerl.world import Job, WorldMap
from tests.sender_kit import sender_settings

SIZES = {"1M": (128, 4, 256), "20M": (512, 5, 2048), "100M": (768, 11, 4096)}
"""Name → hidden size, layers, vocabulary of a Qwen2 with a tied head."""
GPU_SIZES = {name.rpartition("-")[2]: shape for name, shape in PUBLISHED_SHAPES.items() if "Qwen2.5" in name}
"""Of Qwen2.5, with random weights."""
START_S = 300.0
TIMEOUT_S = 300.0
CONCURRENCY = 16
BUCKET_MB = 8
ALONE_SEQUENCES = (64, 128, 256, 512, 768)


def build_model(path: Path, hidden: int, layers: int, vocab: int) -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        intermediate_size=4 * hidden,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(path)
    return model


def build_on_gpu(path: Path, shape: ModelShape) -> torch.nn.Module:
    """The model lies on the GPU. Its folder has the configuration alone, and the server starts with other values."""
    from transformers import Qwen2ForCausalLM

    from pipelinerl.launcher.gpu_check.trial_model import qwen2_config

    config = qwen2_config(shape, max_position_embeddings=2048)
    config.save_pretrained(path)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return Qwen2ForCausalLM(config).bfloat16()


def write_run(run_dir: Path, model: Path, accelerator: Literal["cpu", "cuda"] = "cpu", alone: bool = False) -> Job:
    """The server's job. On a GPU the model has no file of weights. ``alone``: the trainer is not on that GPU."""
    kwargs, on_gpu = "vllm_config.vllm_kwargs", accelerator == "cuda"
    share = on_gpu and not alone
    cfg = compose(
        "base",
        [
            f"output_dir={run_dir}",
            f"model_path={model}",
            "dataset_loader=none.none",
            "actor.rollout_policy=none.none",
            f"world.accelerator={accelerator}",
            f"{kwargs}.dtype={'bfloat16' if on_gpu else 'float32'}",
            f"{kwargs}.max_model_len=1024",
            f"{kwargs}.max-num-batched-tokens=2048",
            f"+{kwargs}.skip-tokenizer-init=true",
            *(
                [
                    f"+{kwargs}.load-format=dummy",
                    f"{kwargs}.gpu-memory-utilization={0.45 if share else 0.9}",
                    f"world.share_devices={str(share).lower()}",
                ]
                if on_gpu
                else []
            ),
        ],
    )
    (run_dir / "conf").mkdir(parents=True)
    OmegaConf.save(cfg, run_dir / "conf" / "config.yaml", resolve=True)
    port = free_port()
    cores = () if on_gpu else tuple(sorted(os.sched_getaffinity(0))[:1])
    gpus = (0,) if on_gpu else ()
    job = Job(name="actor_llm_0", kind="actor_llm", port=port, cores=cores, gpus=gpus, url=f"http://127.0.0.1:{port}")
    fields = {
        "accelerator": accelerator,
        "share_devices": share,
        "nodes": [{"rank": 0, "hostname": "127.0.0.1", "devices": 1 if on_gpu else 2}],
        "jobs": [msgspec.to_builtins(job), {"name": "finetune_0", "kind": "finetune"}],
    }
    ports = ("master_port", "weight_port", "weight_ports")
    msgspec.convert(fields | dict.fromkeys(ports, 0), WorldMap).save(run_dir)
    return job


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def server(run_dir: Path, job: Job, secret: str) -> Iterator[None]:
    """This file as the server process, with a worker that can also load tensors one by one."""
    env = os.environ | role_environment(job, WorldMap.load(run_dir), os.environ)
    env |= {"PIPELINERL_SECRET": secret, "PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"}
    with open(run_dir / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--run-dir", str(run_dir), "--job", job.name],
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{job.url}/weight_info", timeout=5).status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((run_dir / "server.log").read_text()[-3000:])
            time.sleep(0.1)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


@contextlib.contextmanager
def load(job: Job) -> Iterator[None]:
    """Keep the server decoding."""
    stop = threading.Event()
    sampling = {"n": CONCURRENCY, "max_tokens": 400, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling}

    def decode() -> None:
        with httpx.Client(base_url=job.url, timeout=TIMEOUT_S) as client:
            while not stop.is_set():
                client.post("/inference/v1/generate", json=body).raise_for_status()

    thread = threading.Thread(target=decode)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def decode_step_ms(job: Job, tokens: int = 100, sequences: int = CONCURRENCY) -> float:
    """One decoding step of the load, which every pause has to wait for: part of one, or one that began with it."""
    sampling = {"n": sequences, "max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    body = {"token_ids": [1, 2, 3], "sampling_params": sampling}
    with httpx.Client(base_url=job.url, timeout=TIMEOUT_S) as client:
        for _ in range(2):  # the first warms up
            started = time.monotonic()
            client.post("/inference/v1/generate", json=body).raise_for_status()
    return round(1e3 * (time.monotonic() - started) / tokens, 1)


def pushed(
    job: Job,
    model: torch.nn.Module,
    secret: str,
    updates: int,
    beside: Sequence[Job] = (),
    pace: Callable[[int], None] | None = None,
    bucket_mb: int = BUCKET_MB,
) -> list[UpdateOutcome]:
    """Updates of ``job``, when other servers get them too. ``pace``: limits the trainer's link, see `SourceServer`."""
    jobs = [job, *beside]
    specs = tuple(spec_of(name, weight) for name, weight in model.named_parameters())
    device = next(model.parameters()).device
    settings = sender_settings(
        bucket_bytes=bucket_mb << 20,
        timeout_s=TIMEOUT_S,
        secret=secret,
        transport="ipc" if device.type == "cuda" else "tcp",
        device=device,
    )
    sender = WeightSender(lambda: jobs, settings, lambda message: None)
    sender.origin.source_server._pace = pace or sender.origin.source_server._pace
    outcomes = []
    try:
        assert sender.wait_for_servers(len(jobs), TIMEOUT_S) == len(jobs)
        for version in range(updates + 1):
            sender.send(version, model.named_parameters(), specs)
            assert sender.wait_live(version, TIMEOUT_S, count=len(jobs)), sender.outcomes
            outcomes.append(sender.outcomes[job.name])
            time.sleep(0.2)
    finally:
        sender.close()
    return outcomes[1:]  # the first connects and allocates


def staged(job: Job, model: torch.nn.Module, secret: str, updates: int, bucket_mb: int = BUCKET_MB) -> dict[str, Any]:
    outcomes = pushed(job, model, secret, updates, bucket_mb=bucket_mb)
    answers = [outcome.answer for outcome in outcomes if outcome.answer is not None]
    return {
        "pause_ms": summary([answer.pause_ms for answer in answers]),
        "swap_ms": summary([answer.swap_ms for answer in answers]),
        "beyond_swap_ms": summary([answer.pause_ms - answer.swap_ms for answer in answers]),
        "update_ms": summary([1e3 * outcome.seconds for outcome in outcomes]),
        "num_bytes": outcomes[0].num_bytes,
    }


def one_by_one(job: Job, model: torch.nn.Module, secret: str, updates: int) -> dict[str, Any]:
    registry = BufferRegistry()
    for name, param in model.named_parameters():
        registry.put(name, param.detach().view(-1).view(torch.uint8))
    source_server = SourceServer(registry, secret=secret, host="127.0.0.1")
    specs = [msgspec.to_builtins(spec_of(name, param)) for name, param in model.named_parameters()]
    body = {"method": "load_one_by_one", "args": [source_server.address.port, specs]}
    headers = {"Authorization": f"Bearer {secret}"}
    pauses = []
    with httpx.Client(base_url=job.url, headers=headers, timeout=TIMEOUT_S) as client:
        for _ in range(updates + 1):
            started = time.monotonic()
            client.post("/pause", params={"mode": "keep", "clear_cache": False}).raise_for_status()
            client.post("/collective_rpc", json=body).raise_for_status()
            client.post("/resume").raise_for_status()
            pauses.append(1e3 * (time.monotonic() - started))
            time.sleep(0.2)
    source_server.close()
    return {"pause_ms": summary(pauses[1:])}


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


def measure(name: str, updates: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="weight-update-") as folder:
        model = build_model(Path(folder) / "model", *SIZES[name])
        job = write_run(Path(folder) / "run", Path(folder) / "model")
        secret = secrets.token_hex(16)
        with server(Path(folder) / "run", job, secret):
            step_ms = decode_step_ms(job)
            with load(job):
                ours = staged(job, model, secret, updates)
                theirs = one_by_one(job, model, secret, updates)
    ratio = theirs["pause_ms"]["median"] / ours["pause_ms"]["median"]
    params = sum(param.numel() for param in model.parameters())
    row = {"size": name, "params": params, "decode_step_ms": step_ms, "staged": ours, "one_by_one": theirs}
    return row | {"pause_ratio": round(ratio, 1)}


def measure_on_gpu(name: str, updates: int, buckets_mb: Sequence[int], alone: bool) -> list[dict[str, Any]]:
    """A row for each size of bucket, all on one server. ``alone``: the trainer's model lies in host memory."""
    rows, shape = [], GPU_SIZES[name]
    with tempfile.TemporaryDirectory(prefix="weight-update-") as folder:
        model = build_on_gpu(Path(folder) / "model", shape)
        if alone:
            model = model.cpu()
            torch.cuda.empty_cache()
        job = write_run(Path(folder) / "run", Path(folder) / "model", "cuda", alone)
        secret = secrets.token_hex(16)
        gpu = gpu_named(torch.cuda.get_device_name())[1]
        memory = torch.cuda.get_device_properties(0).total_memory
        planned = predicted_pause_s(load_run(Path(folder) / "run"), shape, gpu, 1, memory)
        with server(Path(folder) / "run", job, secret):
            step_ms = decode_step_ms(job)
            rates = {n: round(1e3 * n / decode_step_ms(job, sequences=n)) for n in ALONE_SEQUENCES if alone}
            for bucket_mb in buckets_mb:
                with load(job):
                    ours = staged(job, model, secret, updates, bucket_mb)
                about = {"size": name, "params": shape.parameters, "decode_step_ms": step_ms, "bucket_mb": bucket_mb}
                about |= {"alone": True, "tokens_per_s": rates} if alone else {}
                rows.append(about | {"staged": ours, "planned_pause_ms": round(1e3 * planned, 1)})
                print_row(rows[-1])
    return rows


def print_row(row: dict[str, Any]) -> None:
    ours, pause = row["staged"], row["staged"]["pause_ms"]
    beside = ""
    if "one_by_one" in row:
        beside = f"; one by one pause {row['one_by_one']['pause_ms']['median']:.0f} ms; ratio {row['pause_ratio']}"
    buckets = f", {row['bucket_mb']} MB buckets" if "bucket_mb" in row else ""
    print(
        f"{row['size']:>5}{buckets}: staged pause {pause['median']:.1f} ms (max {pause['max']:.1f}), of it swap "
        f"{ours['swap_ms']['median']:.1f} ms (a decoding step takes {row['decode_step_ms']:.1f} ms), "
        f"whole update {ours['update_ms']['median']:.0f} ms{beside}",
        flush=True,
    )


def serve() -> None:
    """The server process: the project's server with the baseline's worker methods added."""
    import pipelinerl.inference.__main__ as role
    import pipelinerl.inference.args as server_args
    from pipelinerl.membership.role import run_role

    server_args.WEIGHT_EXTENSION = "one_by_one_worker.OneByOneExtension"
    run_role(role.main)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, *GPU_SIZES], help="those of the accelerator")
    parser.add_argument("--bucket-mb", nargs="+", type=int, default=[BUCKET_MB], help="on a GPU")
    parser.add_argument("--alone", action="store_true", help="the server has the GPU for itself")
    parser.add_argument("--updates", type=int, default=10)
    args = parser.parse_args()
    rows = []
    if args.accelerator == "cuda":
        for name in args.sizes or ["0.5B"]:
            rows += measure_on_gpu(name, args.updates, args.bucket_mb, args.alone)
    else:
        torch.set_num_threads(1)
        for name in args.sizes or list(SIZES):
            rows.append(measure(name, args.updates))
            print_row(rows[-1])
    if args.json:
        device = torch.cuda.get_device_name() if args.accelerator == "cuda" else machine()
        document = {"machine": device, "cores": os.cpu_count(), "rows": rows}
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        serve()
    else:
        main()
