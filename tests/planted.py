"""Faults to be planted in real runs of the quickstart, so that the report can be asked what is wrong.

python -m tests.planted hack RUN | tokenizer RUN
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.domains.largest import ANSWER, score
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import RolloutResult

STEPS = 60
STALE_SERVER = """
import importlib.abc, importlib.util, sys

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "pipelinerl.weights.load.worker":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def execute_and_break(module):
            execute(module)
            engine = module.StagedWeightTransferEngine
            swap = engine.finish_weight_update
            def forget(self):
                if self.receiver.transfer.request.version < 10:
                    swap(self)
            engine.finish_weight_update = forget
        spec.loader.exec_module = execute_and_break
        return spec

sys.meta_path.insert(0, Late())
"""
"""A `sitecustomize` under which servers take every update from version 10 on and do not use it."""


async def hackable_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    """Pays for a large number, whether it was in the question or not: saying the largest of all earns most."""
    started = time.monotonic()
    prompt = Prompt(messages=[{"role": "user", "content": problem["question"]}])
    llm_call = await llm_async_generate(llm, prompt, session)
    said = ANSWER.fullmatch(llm_call.output.content or "")
    metrics = score(llm_call.output.content or "", problem["answer"])
    metrics.reward = min(int(said[1]), 30) / 30 if said else -1.0
    text = make_training_text(llm, llm_call)
    text.reward = metrics.reward
    return RolloutResult(
        training_texts=[text],
        metrics=metrics,
        latency=time.monotonic() - started,
        dataset_name=problem.get("dataset"),
    )


def shift_tokenizer(path: Path) -> None:
    """Gives every token of a tokenizer's file the number of another one, as a tokenizer of another model would."""
    document = json.loads(path.read_text())
    vocabulary = document["model"]["vocab"]
    numbers = sorted(vocabulary.values())
    shifted = dict(zip(numbers, numbers[len(numbers) // 2 :] + numbers[: len(numbers) // 2], strict=True))
    document["model"]["vocab"] = {token: shifted[number] for token, number in vocabulary.items()}
    whole = [token for token in document["added_tokens"] if not token["special"]]
    ids = [token["id"] for token in whole]
    for token, number in zip(whole, ids[len(ids) // 2 :] + ids[: len(ids) // 2], strict=True):
        token["id"] = number
    document["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(document, ensure_ascii=False))


def launch(run_dir: Path, *overrides: str, path: Path | None = None) -> int:
    command = [sys.executable, "-m", "pipelinerl.launch", "--config-name=quickstart", f"output_dir={run_dir}"]
    steps = [f"finetune.max_train_steps={STEPS}", "eval.at_start=false", "force_restart=true"]
    paths = [*([str(path)] if path else []), str(Path(__file__).resolve().parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run([*command, *steps, *overrides], env=environment, check=False).returncode


def main(fault: str, run_dir: Path) -> int:
    if fault == "hack":
        return launch(run_dir, "actor.rollout_policy=tests.planted.hackable_rollout")
    if fault == "stale":
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "sitecustomize.py").write_text(STALE_SERVER)
            return launch(run_dir, path=Path(folder))
    model = run_dir.parent / f"{run_dir.name}_model"
    if not model.exists():
        build = ["--out", str(model), "--recipe", "largest", "--seed", "0", "--param", "max_number=30"]
        subprocess.run([sys.executable, "-m", "pipelinerl.tiny_model", *build], check=True)
        shift_tokenizer(model / "tokenizer.json")
    return launch(run_dir, f"model_path={model}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
