"""A domain whose problems are pictures: the model is asked for the colour of a square."""

import base64
import time
from typing import Any

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from tests.vision import picture

SIZES = ((28, 28), (56, 28), (40, 40), (28, 56))


def load_problems(dataset_names: list[str]) -> list[dict]:
    return [{"size": size, "seed": seed, "dataset": n} for n in dataset_names for seed in range(4) for size in SIZES]


def question(image: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(image).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "which colour?"}],
    }


async def generate_rollout(cfg: Any, llm: TrainableLLM, problem: dict, session: Any) -> RolloutResult:
    begin = time.time()
    messages = [question(picture(*problem["size"], seed=problem["seed"]))]
    call = await llm_async_generate(llm, Prompt(messages=messages), session)
    said = call.output.content or ""
    text = make_training_text(llm, call)
    text.reward = sum(letter in "aeiou" for letter in said) / max(len(said), 1)
    metrics = BaseMetrics(reward=text.reward, success=text.reward > 0.1, no_error=True, no_answer=not said)
    return RolloutResult(training_texts=[text], metrics=metrics, latency=time.time() - begin)
