"""What `peers.py` and the peer's process share: the project's own problems, prompts and rewards, without its roles.

Held-out figures are computed by the same code for both. Of `quickstart` it is exact: the probability, under the model,
of the one right answer to each test problem. Of `words` it is the mean reward of one answer to each, sampled with the
same seed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.words import words
from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.load import compose, to_container
from pipelinerl.domains.largest import score

Problem = dict[str, Any]
ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Task:
    """A shipped configuration, as another trainer needs it."""

    settings: dict[str, Any]
    """The composed configuration."""
    ask: Callable[[Problem], str]
    reward: Callable[[str, Problem, bool], float]
    """(answer, problem, whether the answer ended by itself) → reward"""
    measure: str
    """What a held-out figure is: `success` or `reward`."""
    held_out: Callable[[Path, "Task"], float]
    """Of the model in a folder."""

    def problems(self, part: str) -> list[Problem]:
        load = resolve_function(self.settings["dataset_loader"])
        return load([part], **(self.settings["dataset_loader_params"] or {}))

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.ask(problem)}]


def load_task(name: str, seed: int, overrides: Sequence[str] = ()) -> Task:
    """The task of the configuration ``quickstart`` or ``words``."""
    settings = to_container(compose(name, [f"seed={seed}", *overrides]))
    if name == "quickstart":
        return Task(
            settings=settings,
            ask=lambda problem: problem["question"],
            reward=lambda text, problem, _: score(text, problem["answer"]).reward,
            measure="success",
            held_out=held_out_success,
        )
    assert name == "words", f"the problems of {name} are not known here"
    return Task(
        settings=settings,
        ask=lambda problem: words.question(problem["topic"], problem["length"]),
        reward=lambda text, problem, ended: words.reward(problem["length"], words.count_words(text) if ended else None),
        measure="reward",
        held_out=held_out_reward,
    )


@torch.inference_mode()
def held_out_reward(folder: Path, task: Task) -> float:
    """Mean reward of one sampled answer to every test problem."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    torch.manual_seed(0)
    problems = task.problems("test")
    prompts = [
        tokenizer.apply_chat_template(task.messages(problem), tokenize=False, add_generation_prompt=True)
        for problem in problems
    ]
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = task.settings["test_llm"]["parameters"]
    said_BL = model.generate(
        **asked,
        do_sample=True,
        temperature=sampling["temperature"],
        top_k=0,
        top_p=1.0,
        max_new_tokens=sampling["max_tokens"],
        pad_token_id=tokenizer.pad_token_id,
    )[:, asked["input_ids"].shape[1] :]
    rewards = [
        task.reward(tokenizer.decode(said_L, skip_special_tokens=True), problem, tokenizer.eos_token_id in said_L)
        for said_L, problem in zip(said_BL, problems, strict=True)
    ]
    return sum(rewards) / len(rewards)


@torch.inference_mode()
def held_out_success(folder: Path, task: Task) -> float:
    """Of ``quickstart``: mean probability of the right answer, its end included, over the test problems."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    encoded = []
    for problem in task.problems("test"):
        prompt = tokenizer.apply_chat_template(task.messages(problem), tokenize=False, add_generation_prompt=True)
        asked = tokenizer.encode(prompt, add_special_tokens=False)
        said = tokenizer.encode(f"<answer>{problem['answer']}</answer>{tokenizer.eos_token}", add_special_tokens=False)
        encoded.append((asked + said, len(asked)))
    encoded.sort(key=lambda row: len(row[0]))
    total = 0.0
    for first in range(0, len(encoded), ROWS):
        rows = encoded[first : first + ROWS]
        ids_BL = torch.full((len(rows), max(len(ids) for ids, _ in rows)), tokenizer.pad_token_id)
        for index, (ids, _) in enumerate(rows):
            ids_BL[index, : len(ids)] = torch.tensor(ids)
        logprobs_BL = -torch.nn.functional.cross_entropy(
            model(input_ids=ids_BL, use_cache=False).logits[:, :-1].transpose(1, 2), ids_BL[:, 1:], reduction="none"
        )
        for index, (ids, start) in enumerate(rows):
            total += float(logprobs_BL[index, start - 1 : len(ids) - 1].double().sum().exp())
    return total / len(encoded)
