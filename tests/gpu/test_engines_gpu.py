"""Every engine on one GPU: the losses of the CPU, resume, export, and memory as planned."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.nn.attention.varlen import varlen_attn
from transformers import AutoModelForCausalLM

from benchmarks.step_memory import SIZES, planned, save_model
from tests.engine_runs import ENGINES, ROOT, run_ranks, trainer_imported
from tests.gpu.device import DEVICE
from tests.models import save_qwen2
from tests.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
STEPS, HALF = 6, 3
TOKENS = 8192
MOST_USED = 1.03
"""Peak over plan. It was 0.95–1.02 for models of 0.5B to 3B on an H200."""
MOST_UNUSED = 1.35
"""Plan over peak. It was 1.27 and less on an H200 at this small size, and 1.00 at that of a model of 0.5B."""


@pytest.fixture(scope="module", autouse=True)
def imported_once() -> Iterator[None]:
    with trainer_imported():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2(tmp_path_factory.mktemp("model"), vocab_size=64)


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    return run_ranks(tmp_path_factory.mktemp("cpu") / "out.json", 1, "ddp", model, steps=[0, STEPS])


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_has_the_losses_of_the_cpu_and_resumes_and_exports(
    engine: str, model: Path, expected: list[dict[str, float]], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    out = first / "out.json"
    steps = {"steps": [0, HALF], "save_at": HALF, "save": str(first)}
    ours = run_ranks(out, 1, engine, model, accelerator=DEVICE.type, **steps)
    ours += run_ranks(
        second / "out.json", 1, engine, model, accelerator=DEVICE.type, steps=[HALF, STEPS], load=str(first)
    )
    for step, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        for name in ("loss", "grad_norm", "entropy"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), f"step {step} {name}"
    exported = AutoModelForCausalLM.from_pretrained(first / "exports" / f"step_{HALF}").state_dict()
    weights = load_file(out.with_suffix(".safetensors"))
    assert max((exported[n.removeprefix("lm.")].float() - w.float()).abs().max() for n, w in weights.items()) <= 1e-6


def repeated_bytes(recomputed: str) -> int:
    """Keys and values of one layer, or of all that are kept: torch 2.11's kernel wants a key head per query head."""
    if DEVICE.type == "cpu" or "enable_gqa" in inspect.signature(varlen_attn).parameters:
        return 0
    shape = SIZES["wide"]
    return (shape["num_hidden_layers"] if recomputed == "false" else 1) * 2 * 2 * TOKENS * shape["hidden_size"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("recomputed", ["true", "false", "selective"])
def test_peak_on_the_device_is_within_the_plan(engine: str, recomputed: str, tmp_path: Path) -> None:
    """``max_memory_allocated`` of a step in bfloat16, beside the items of the plan that are tensors."""
    model = save_model(tmp_path / "model", SIZES["wide"])
    case = [f"model_path={model}", f"finetune.engine={engine}", f"finetune.seq_length={TOKENS}"]
    case += [f"finetune.gradient_checkpointing={recomputed}", "finetune.head_chunk_tokens=1024"]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    job = {"cases": [case], "out": str(tmp_path / "peaks"), "accelerator": DEVICE.type}
    script = ROOT / "benchmarks" / "step_memory_rank.py"
    env = os.environ | ranks | {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(script), json.dumps(job)], env=env, check=True, timeout=300)
    peaks = json.loads((tmp_path / "peaks.0.0").read_text())
    plan = planned(case, model, 1, cuda=DEVICE.type == "cuda") | {"repeated keys": repeated_bytes(recomputed)}
    assert peaks["step"] / MOST_USED <= sum(plan.values()) <= MOST_UNUSED * peaks["step"], plan
