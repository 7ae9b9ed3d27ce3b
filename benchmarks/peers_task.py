"""What `peers.py` and the peer's process share: the project's own problems, prompts and rewards, without its roles.

Held-out success is exact: the probability, under the model, of the one right answer to each test problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    right: Callable[[Problem], str]
    reward: Callable[[str, Problem], float]

    def problems(self, part: str) -> list[Problem]:
        load = resolve_function(self.settings["dataset_loader"])
        return load([part], **self.settings["dataset_loader_params"])

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.ask(problem)}]


def load_task(name: str, seed: int) -> Task:
    """The task of the configuration ``quickstart``."""
    assert name == "quickstart", f"the problems of {name} are not known here"
    return Task(
        settings=to_container(compose(name, [f"seed={seed}"])),
        ask=lambda problem: problem["question"],
        right=lambda problem: f"<answer>{problem['answer']}</answer>",
        reward=lambda text, problem: score(text, problem["answer"]).reward,
    )


@torch.inference_mode()
def held_out_success(folder: Path, task: Task) -> float:
    """Mean probability of the right answer, its end included, over the test problems."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    encoded = []
    for problem in task.problems("test"):
        prompt = tokenizer.apply_chat_template(task.messages(problem), tokenize=False, add_generation_prompt=True)
        asked = tokenizer.encode(prompt, add_special_tokens=False)
        said = tokenizer.encode(task.right(problem) + tokenizer.eos_token, add_special_tokens=False)
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
