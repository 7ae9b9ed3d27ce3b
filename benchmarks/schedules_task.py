"""The task of `schedules.py`: name the last of three numbers, in a completion of prescribed length.

How long a completion is, is drawn for each rollout and forced upon the server (`ignore_eos`, `max_tokens`): lengths are
the benchmark's choice and the same under every schedule, whatever the model learns. The answer comes first; what
follows it is generated, transported and run through the trainer like everything else, but masked in the labels, so
that learning does not depend on its length. Held-out success is exact: the probability of the right answer under the
model, over all triples whose sum is divisible by 5, which are never trained. Imports nothing heavy: rollout workers
load it.
"""

import time
from functools import cache
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from omegaconf import DictConfig

from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.llm import Prompt, TrainableLLM
from pipelinerl.plan.lengths import Lengths
from pipelinerl.rollouts import BaseMetrics, RolloutResult

MAX_NUMBER = 30
MEAN, LONGEST = 40, 220
ANSWER_TOKENS = 3
FIRST_REQUEST = "first_request"
"""File of a run's folder: when the first rollout began."""
LENGTHS = {
    "heavy": Lengths(np.r_[np.zeros(3), Lengths.lognormal(MEAN - 3, LONGEST - 3, sigma=1.1).probabilities]),
    "constant": Lengths.constant(MEAN),
}
"""Tokens of a completion: three more than log-normal up to 217, or 40; the mean is 40 each time."""
WIDTH, EXTRA_LAYERS = 1536, 2
"""A width at which, on some machine, the trainer's core has as much to do per sample as the server's."""
FILLER = "0"
"""One token of the task's tokenizer."""


def held_out(numbers: tuple[int, ...]) -> bool:
    return sum(numbers) % 5 == 0


def question(numbers: tuple[int, ...], filler: int = 0) -> str:
    """``filler``: further tokens, which a group's attempts read once and the trainer computes for each of them."""
    first, second, third = numbers
    return f"Which is the last of {first}, {second} and {third}?{filler * FILLER}"


def answer(number: int) -> str:
    return f"<answer>{number}</answer>"


def load_problems(dataset_names: list[str], lengths: str, filler: int) -> list[dict[str, Any]]:
    """Every ordered triple that is not held out."""
    assert dataset_names == ["train"], "held-out success is computed from the weights, see success_of"
    triples = permutations(range(1, MAX_NUMBER + 1), 3)
    known = {"dataset": "train", "lengths": lengths, "filler": filler}
    return [known | {"numbers": list(n)} for n in triples if not held_out(n)]


@cache
def length_source(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@cache
def note_first_request(folder: Path) -> None:
    (folder / FIRST_REQUEST).write_text(repr(time.time()))


async def generate_rollout(
    cfg: DictConfig, llm: TrainableLLM, problem: dict[str, Any], session: aiohttp.ClientSession
) -> RolloutResult:
    started = time.monotonic()
    note_first_request(Path(cfg.output_dir))
    length = int(LENGTHS[problem["lengths"]].sample(length_source(cfg.seed), 1)[0])
    llm.parameters = {**llm.parameters, "max_tokens": length, "ignore_eos": True}
    call = await llm_async_generate(
        llm, Prompt.from_user_message(question(problem["numbers"], problem["filler"])), session
    )
    success = (call.output.content or "").startswith(answer(problem["numbers"][-1]))
    text = make_training_text(llm, call)
    text.reward = float(success)
    text.labels[call.prompt_length_tokens + ANSWER_TOKENS :] = [-100] * (length - ANSWER_TOKENS)
    metrics = BaseMetrics(reward=text.reward, success=success, no_error=True, no_answer=False)
    latency = time.monotonic() - started
    return RolloutResult(training_texts=[text], metrics=metrics, latency=latency, dataset_name="train")


def conversation(rng: Random) -> list[dict[str, str]]:
    """Warm-up: names any of the three numbers."""
    while True:
        numbers = tuple(rng.sample(range(1, MAX_NUMBER + 1), 3))
        if not held_out(numbers):
            break
    return [
        {"role": "user", "content": question(numbers)},
        {"role": "assistant", "content": answer(rng.choice(numbers))},
    ]


def build_model(folder: Path, width: int, seed: int) -> None:
    """A tiny model that names one number in three at random, and computes as much per token as one of ``width``.

    The small one is built beside it, once.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelinerl.tiny_model.builder import write_model
    from pipelinerl.tiny_model.recipes import ANSWER_TAGS, Recipe

    small = folder.with_name("small")
    if not small.exists():
        small.mkdir(parents=True)
        write_model(small, Recipe(tags=ANSWER_TAGS, max_number=MAX_NUMBER, conversation=conversation), seed)
    widened(AutoModelForCausalLM.from_pretrained(small, dtype="float32"), width).save_pretrained(folder)
    AutoTokenizer.from_pretrained(small).save_pretrained(folder)


def widened(model: Any, width: int) -> Any:
    """The same function with wider and more layers: what is added is multiplied by zero, and too small to disturb."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    old = model.config.to_dict()
    layers, narrow = old["num_hidden_layers"], old["intermediate_size"]
    old.pop("layer_types", None)
    torch.manual_seed(0)
    wide = Qwen2ForCausalLM(
        Qwen2Config(**{**old, "intermediate_size": width, "num_hidden_layers": layers + EXTRA_LAYERS})
    )
    known = model.state_dict()
    with torch.no_grad():
        for name, target in wide.state_dict().items():
            source = known.get(name)
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                target.mul_(0.01)
            if name.endswith(("down_proj.weight", "o_proj.weight")):
                target.zero_()
            if source is None:
                continue
            if name.endswith("down_proj.weight"):
                target[:, :narrow] = source
            else:
                target[: source.shape[0]] = source
    return wide


def success_of(model_path: Path, snapshots: dict[int, dict[str, Any]], threads: int) -> dict[int, float]:
    """Held-out success of each snapshot: mean probability of the right answer over a fixed sample of those triples."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    triples = [n for n in permutations(range(1, MAX_NUMBER + 1), 3) if held_out(n)][::40]
    rows = []
    for numbers in triples:
        asked = [{"role": "user", "content": question(numbers)}]
        prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        rows.append(tokenizer.encode(prompt + answer(numbers[-1]), add_special_tokens=False))
    ids_BL = torch.tensor(rows)
    result = {}
    for step, weights in snapshots.items():
        model.load_state_dict(weights, strict=False)
        with torch.no_grad():
            logits_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, -ANSWER_TOKENS - 1 : -1]
            scores_BL = logits_BLV.log_softmax(-1).gather(-1, ids_BL[:, -ANSWER_TOKENS:, None])[..., 0]
        result[step] = float(scores_BL.sum(1).exp().mean())
    return result
