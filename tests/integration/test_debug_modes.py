"""Roles without the rest of their run: the actor on servers that others run, the next roles on what it recorded."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pipelinerl.testing import FakeServer, save_tokenizer
from tests.actor_run import TOKENIZER, answer_largest
from tests.integration.conftest import build_model
from tests.site_proxy import FOREIGN, proxied

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guides" / "debug-modes.md"
STEPS, BATCH, ATTEMPTS = 2, 16, 4
SETTINGS = (
    "--config-name=quickstart",
    "tiny_model=null",
    f"attempts={ATTEMPTS}",
    f"finetune.gradient_accumulation_passes={BATCH}",
    "finetune.save_checkpoint_steps=1000",
    "llm.parameters.max_tokens=48",
    "test_llm.parameters.max_tokens=48",
    "eval.max_problems=3",
    "dataset_loader_params.max_number=12",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_model(tmp_path_factory.mktemp("alone") / "model", hidden=64, layers=1, vocab=300)
    return save_tokenizer(folder, TOKENIZER)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    async with FakeServer(answer_largest, version="default") as running:
        yield running


async def launch(model: Path, folder: Path, *overrides: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "pipelinerl.launch", *SETTINGS, f"model_path={model}", f"output_dir={folder}"]
    process = await asyncio.create_subprocess_exec(
        *command, *overrides, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=ROOT
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 600)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert process.returncode == code, output.decode()[-4000:]
    return output.decode()


def figures(folder: Path) -> dict:
    return json.loads((folder / "alone.json").read_text())


def rollouts_of(folder: Path) -> str:
    command = [sys.executable, "-m", "pipelinerl", "rollouts", str(folder), "--best", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


async def test_rollouts_are_made_packed_and_trained_one_after_the_other(
    model: Path, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy, through which the rollouts ask foreign services, and neither roles nor servers."""
    made, packed, trained = tmp_path / "made", tmp_path / "packed", tmp_path / "trained"
    steps = f"finetune.max_train_steps={STEPS}"
    rollouts = ("debug.mode=actor", f"debug.existing_llms=[{server.url}]", "train_subset={begin: 2, end: 5}", steps)
    policy = "actor.rollout_policy=tests.site_proxy.generate_rollout"
    with proxied(monkeypatch) as reached:
        said = await launch(model, made, *rollouts, policy)
    assert "evaluation       success 1.000" in said
    assert f"pipelinerl rollouts {made}" in said
    found = figures(made)
    assert set(reached) == {FOREIGN}
    assert len(reached) >= found["rollouts"] >= STEPS * BATCH
    assert (found["problems"], found["dropped"], found["failures"]) == (3, {}, {})
    assert found["success"] == 1 / ATTEMPTS, "the fake answers the first attempt of a group rightly"
    shown = await asyncio.to_thread(rollouts_of, made)
    assert "reward 1" in shown
    assert "is finished" in await launch(model, made, *rollouts, policy), "the same command says what it found"

    said = await launch(model, packed, "debug.mode=preprocessor", f"debug.streams_from={made}", steps)
    assert figures(packed) == {
        "mode": "preprocessor",
        "batches": found["rollouts"] // BATCH,
        "rollouts_packed": found["rollouts"] // BATCH * BATCH,
        "rollouts_dropped": {},
        "tokens": figures(packed)["tokens"],
    }
    await launch(model, trained, "debug.mode=finetune", f"debug.streams_from={packed}", "finetune.max_train_steps=9")
    result = figures(trained)
    assert result["optimizer_steps"] == figures(packed)["batches"], "it ends with the recorded data"
    assert result["rollouts_trained"] == figures(packed)["rollouts_packed"]
    assert result["last"]["grad_norm"] > 0


@pytest.mark.slow
async def test_evaluation_alone_is_one_evaluation(model: Path, server: FakeServer, tmp_path: Path) -> None:
    run = ("debug.mode=evaluation", f"debug.existing_llms=[{server.url}]", "eval.attempts=2")
    said = await launch(model, tmp_path / "run", *run)
    assert "evaluation       success 0.500" in said
    assert figures(tmp_path / "run")["rollouts"] == 0


async def test_command_evaluate_prints_pass_at_k_and_leaves_nothing(
    model: Path, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pipelinerl", "evaluate", str(model), *SETTINGS, "--attempts=4"),
        *(f"--out={tmp_path / 'out.json'}", f"debug.existing_llms=[{server.url}]"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    output, errors = await asyncio.wait_for(process.communicate(), 600)
    assert process.returncode == 0, errors.decode()[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())
    row = found["datasets"]["test"]
    assert (row["problems"], row["pass@1"]["value"], row["pass@4"]["value"]) == (3, 0.25, 1.0)
    assert row["pass@2"]["value"] == pytest.approx(1 / 2), "the fake solves the first of four attempts"
    assert output.decode().splitlines()[1].split()[:3] == ["test", "3", "0.250"]
    assert list((tmp_path / "temporary").iterdir()) == []


async def test_server_that_does_not_answer_is_refused(model: Path, server: FakeServer, tmp_path: Path) -> None:
    server.status = 503
    said = await launch(model, tmp_path / "run", "debug.mode=actor", f"debug.existing_llms=[{server.url}]", code=2)
    assert "status 503" in said
    assert not list((tmp_path / "run").glob("actor_0"))


async def test_variable_makes_a_dry_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRY_RUN", "1")
    said = await launch(model, tmp_path / "run", "debug.mode=servers")
    assert "nothing was started" in said
    assert "# actor_llm_0" in said
    assert "# actor_0" not in said
    assert not (tmp_path / "run").exists()


@contextlib.contextmanager
def servers_of(command: str, folder: Path) -> Iterator[str]:
    """Servers alone, as the page starts them; the part of the command line that names them."""
    log = folder / "servers.out"
    with open(log, "w") as output:
        process = subprocess.Popen(program(command), cwd=folder, stdout=output, stderr=output, env=environment())
    try:
        deadline = time.monotonic() + 300
        while not (found := re.search(r"debug\.existing_llms=\S+", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, log.read_text()


def program(command: str) -> list[str]:
    return [sys.executable, "-m", *shlex.split(command)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    servers, *commands = [line for block in blocks for line in block.splitlines()]
    with servers_of(servers, tmp_path) as named:
        for command in commands:
            line = re.sub(r"debug\.existing_llms=[^' ]+", named, command)
            done = subprocess.run(
                program(line), cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = tmp_path / "results"
    assert figures(results / "try")["problems"] <= 16
    assert figures(results / "trained")["optimizer_steps"] == figures(results / "packed")["batches"] >= 2
    evaluated = json.loads((tmp_path / "pass.json").read_text())["datasets"]["test"]
    chances = [evaluated[f"pass@{k}"]["value"] for k in (1, 2, 4, 8)]
    assert evaluated["problems"] == 512
    assert 0.05 < chances[0] < chances[1] < chances[2] < chances[3] < 1, "a warmed-up model is right by chance"
