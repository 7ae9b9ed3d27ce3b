"""Reward functions as people bring them: in the shapes of verl's examples and of those in TRL's documentation."""

import asyncio
import re
from typing import Any

import numpy as np

CLIP_CHARS = 300


# verl


def gsm8k_score(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0):
    """As `verl.utils.reward_score.gsm8k.compute_score`: no `data_source`, options of its own."""
    pattern = "#### (\\-?[0-9\\.\\,]+)" if method == "strict" else "(\\-?[0-9\\.\\,]+)"
    found = re.findall(pattern, solution_str[-CLIP_CHARS:])
    if not found:
        return 0
    return score if found[-1].replace(",", "") == ground_truth else format_score


def dapo_score(solution_str: str, ground_truth: str, strict_box_verify: bool = False) -> dict[str, Any]:
    """As `verl.utils.reward_score.math_dapo.compute_score`: a dict, one value of which is a text."""
    found = re.findall(r"Answer:\s*([^\n]+)", solution_str)
    acc = bool(found) and found[-1].strip() == ground_truth
    return {"score": 1.0 if acc else -1.0, "acc": acc, "pred": found[-1] if found else None}


def my_reward_fn(data_source, solution_str, ground_truth, extra_info=None):
    """As in verl's documentation."""
    return len(solution_str) / 100


def seen_by_verl(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, solution_str, ground_truth, extra_info) == ("openai/gsm8k", "#### 42", "42", {"index": 7})
    return 1


async def asked_elsewhere(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"score": int(ground_truth in solution_str), "acc": True}


def prime_score(model_output: str, ground_truth: str):
    """As `verl.utils.reward_score.prime_math.compute_score`: another name for the answer, and a tuple."""
    return ground_truth in model_output, True, ground_truth


def numpy_score(solution_str):
    return {"score": np.float32(0.5), "acc": np.float32(0.25), "tokens": np.int64(3)}


def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):
    """verl's batched form, which is none of the two."""
    return [0.0 for _ in solution_strs]


# TRL


def reward_len(completions, **kwargs):
    return [-abs(5 - len(completion)) for completion in completions]


def reward_ids(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def format_reward_func(completions, **kwargs):
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def reward_func(completions, ground_truth, **kwargs):
    matches = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    contents = [match.group(1) if match else "" for match in matches]
    return [1.0 if c == gt else 0.0 for c, gt in zip(contents, ground_truth, strict=True)]


def math_reward_func(prompts, completions, task, **kwargs):
    return [1.0 if kind == "math" and "4" in said else None for said, kind in zip(completions, task, strict=True)]


def coding_reward_func(prompts, completions, task, **kwargs):
    return [0.5 if kind == "coding" else None for _, kind in zip(completions, task, strict=True)]


async def slow_reward(prompts, completions, **kwargs):
    await asyncio.sleep(0)
    return [0.25 for _ in completions]


async def never_ends(completions, **kwargs):
    await asyncio.Event().wait()


class BusyError(Exception):
    """As of a service's client."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


FAILURES: list[Exception] = []
"""What the next calls of ``asks_service`` raise. The test sets it."""


async def asks_service(completions, **kwargs):
    if FAILURES:
        raise FAILURES.pop(0)
    return [0.5 for _ in completions]


class Longer:
    """An instance as a function, as `trl.rewards.get_cosine_scaled_reward` returns one."""

    def __call__(self, completions: list[str], solution: list[str], completion_ids: list[list[int]], **kwargs):
        return [len(ids) / len(text) for ids, text in zip(completion_ids, solution, strict=True)]


longer = Longer()


# neither


def anything(**kwargs):
    return [1.0] if "completions" in kwargs else float("solution_str" in kwargs)


def of_both(solution_str, completions):
    return 0.0


def ends_the_process(completions, **kwargs):
    raise SystemExit("no key")


def raises(completions, **kwargs):
    raise ValueError("no such key")


def says_nan(completions, **kwargs):
    return [float("nan")]


def says_text(solution_str):
    return "1"


def says_number(completions, **kwargs):
    return 1.0


def without_score(solution_str):
    return {"acc": 1.0}


def needs_more(solution_str, reward_router_address):
    return 0.0


def computes_for_ever(solution_str):
    while True:
        pass
