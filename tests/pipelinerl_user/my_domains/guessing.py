import re
import time

import aiohttp
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.rollouts import BaseMetrics, RolloutResult

QUESTION = "Guess a number between 0 and 9. Write <answer>number</answer>."
ROUNDS = 3


async def generate_guessing_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict, session: aiohttp.ClientSession
) -> RolloutResult:
    time_start = time.time()
    llm_calls, reward, error = [], 0.0, 0
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(ROUNDS):
        llm_call = await llm_async_generate(llm, Prompt(messages=messages.copy()), session)
        llm_calls.append(llm_call)
        said = llm_call.output.content or ""
        found = re.search(r"<answer>(\d+)</answer>", said)
        if found is None:
            error = 1
            break
        guess = int(found.group(1))
        if guess == problem["answer"]:
            reward = 1.0 - 0.1 * len(llm_calls)
            break
        hint = "higher" if guess < problem["answer"] else "lower"
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"The number is {hint}."}]
    training_texts = [make_training_text(llm, call) for call in llm_calls]
    for text in training_texts:
        text.reward = reward
    metrics = BaseMetrics(reward=reward, success=reward > 0, no_error=not error, no_answer=error)
    latency = time.time() - time_start
    return RolloutResult(
        training_texts=training_texts, metrics=metrics, latency=latency, dataset_name=problem["dataset"]
    )


def load_problems(dataset_names: list[str]) -> list[dict]:
    return [{"answer": answer, "dataset": name} for name in dataset_names for answer in (3, 7)]
