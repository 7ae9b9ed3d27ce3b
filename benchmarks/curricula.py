"""Sampled tokens until held-out problems are solved, by the sampler that chooses the training problems.

The task has a spread of difficulty: name the largest of one to six numbers. The policy begins by naming any of them, so
it is right once in one to six times. A pool of 240 problems is drawn from again and again.

What is the run's own: the order of problems, the samplers' interface and what samplers are told (`pipelinerl.actor`),
the advantages. What is not: there are no processes and no servers. The policy is a transformer of one layer over the
numbers, an answer is one token, and torch takes a step of REINFORCE per 8 attempts at each of 8 problems. The problems
of a step are drawn three steps before it, as in a run that generates ahead. Success is exact: the probability of the
right answer, mean over 120 problems that are held out, 20 of each difficulty.

`epochs` is what a run does without a sampler: one permutation of all problems after the other. A sampler beats it
beyond the seeds' spread if its slowest seed needs fewer tokens than the fastest one of `epochs`.

    python -m benchmarks.curricula --seeds 0 1 2 --json benchmarks/curricula.json
"""

import argparse
import json
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipelinerl.actor.problems import Place, ProblemSource
from pipelinerl.actor.sampling import Pool, ProblemSampler
from pipelinerl.domains.largest import is_test_triple
from pipelinerl.preprocess.advantages import leave_one_out
from pipelinerl.records import GroupOutcome

MAX_NUMBER, LEVELS = 30, (1, 2, 3, 4, 5, 6)
PER_LEVEL, HELD_OUT_PER_LEVEL = 40, 20
ATTEMPTS, GROUPS, LAG = 8, 8, 3
WIDTH, WARM_UP, WARM_UP_BATCH = 32, 1500, 64
LEARNING_RATE, RL_LEARNING_RATE = 2e-3, 5e-4
EVALUATE_EVERY = 5
Numbers = tuple[int, ...]


def epochs(pool: Pool) -> np.ndarray:
    raise AssertionError("a run without a sampler")


def band(pool: Pool, *, low: float = 0.15, high: float = 0.85, rest: float = 0.05) -> np.ndarray:
    """Problems that are solved now and then, untried ones, and the others rarely."""
    inside_N = (pool.success_N >= low) & (pool.success_N <= high)
    return np.where(inside_N | (pool.groups_N == 0), 1.0, rest)


def bandit(pool: Pool, *, temperature: float = 0.1, explore: float = 0.1) -> np.ndarray:
    """A softmax over the size of the advantages, as if those of untried problems were the largest there are."""
    spread_N = np.nan_to_num(pool.spread_N, nan=0.5)
    gain_N = np.exp((spread_N - spread_N.max()) / temperature)
    return (1 - explore) * gain_N / gain_N.sum() + explore / len(gain_N)


def replay(pool: Pool, *, stale: float = 0.3) -> np.ndarray:
    """Prioritised level replay (arXiv:2010.03934): by the rank of the advantages' size, and by age."""
    rank_N = 1 + np.argsort(np.argsort(-np.nan_to_num(pool.spread_N, nan=np.inf), kind="stable"), kind="stable")
    score_N, age_N = 1.0 / rank_N, (pool.version - pool.version_N).astype(np.float64)
    return (1 - stale) * score_N / score_N.sum() + stale * age_N / max(age_N.sum(), 1.0)


SAMPLERS: dict[str, Callable[..., np.ndarray]] = {f.__name__: f for f in (epochs, band, bandit, replay)}


def draw_numbers(rng: Random, level: int, *, held_out: bool) -> Numbers:
    while True:
        numbers = tuple(rng.sample(range(1, MAX_NUMBER + 1), level))
        if is_test_triple(numbers) == held_out:
            return numbers


def problems(*, held_out: bool) -> list[dict[str, Any]]:
    rng, size = Random(0), HELD_OUT_PER_LEVEL if held_out else PER_LEVEL
    return [{"numbers": draw_numbers(rng, level, held_out=held_out)} for level in LEVELS for _ in range(size)]


class Policy(nn.Module):
    """Names one of up to six numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MAX_NUMBER + 1, WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, MAX_NUMBER + 1)

    def forward(self, shown: Sequence[Numbers]) -> Tensor:
        """float [B, MAX_NUMBER + 1]: log-probabilities of the answers."""
        ids_BL = torch.tensor([[*numbers, *[0] * (max(LEVELS) - len(numbers))] for numbers in shown])
        absent_BL = ids_BL == 0
        states_BLE = self.layer(self.embedding(ids_BL), src_key_padding_mask=absent_BL)
        pooled_BE = states_BLE.masked_fill(absent_BL[..., None], 0.0).sum(1) / (~absent_BL).sum(1, keepdim=True)
        return self.head(pooled_BE).log_softmax(-1)


@cache
def warmed_up(seed: int) -> Policy:
    """A policy that names any of the numbers, and has seen no held-out ones."""
    torch.manual_seed(seed)
    rng, policy = Random(seed), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    for _ in range(WARM_UP):
        shown = [draw_numbers(rng, rng.choice(LEVELS), held_out=False) for _ in range(WARM_UP_BATCH)]
        named_B = torch.tensor([rng.choice(numbers) for numbers in shown])
        nn.functional.nll_loss(policy(shown), named_B).backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy


def success_of(policy: Policy, asked: Sequence[Numbers]) -> np.ndarray:
    """float [B]: the probability of the right answer to each."""
    with torch.no_grad():
        return policy(asked).exp().gather(1, torch.tensor([[max(numbers)] for numbers in asked]))[:, 0].numpy()


def run(name: str, seed: int, target: float, max_steps: int) -> dict[str, Any]:
    """Learns until the target is reached. Returns the tokens sampled until then. null = it was not."""
    train = problems(held_out=False)
    test = [problem["numbers"] for problem in problems(held_out=True)]
    drawing: dict[str, Any] = {"seed": seed, "name": "largest"}
    sampler = None if name == "epochs" else ProblemSampler(train, SAMPLERS[name], size=GROUPS, **drawing)
    source = ProblemSource(num_problems=len(train), sampler=sampler, **drawing)
    policy = deepcopy(warmed_up(seed))
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=RL_LEARNING_RATE, betas=(0.9, 0.95))
    ahead: deque[list[Place]] = deque([source.next_problem() for _ in range(GROUPS)] for _ in range(LAG))
    curve, wasted = [], 0
    for step in count():
        if step % EVALUATE_EVERY == 0:
            success = float(success_of(policy, test).mean())
            curve.append({"tokens": step * GROUPS * ATTEMPTS, "success": round(success, 4)})
            if success >= target or step >= max_steps:
                break
        ahead.append([source.next_problem() for _ in range(GROUPS)])
        places = ahead.popleft()
        asked = [train[place.problem_index]["numbers"] for place in places for _ in range(ATTEMPTS)]
        logprobs_BV = policy(asked)
        named_B = torch.multinomial(logprobs_BV.detach().exp(), 1)[:, 0]
        rewards_GA = (named_B == torch.tensor([max(numbers) for numbers in asked])).double().numpy()
        rewards_GA = rewards_GA.reshape(GROUPS, ATTEMPTS)
        advantages_B = torch.from_numpy(np.concatenate([leave_one_out(rewards_A) for rewards_A in rewards_GA]))
        (-(advantages_B * logprobs_BV.gather(1, named_B[:, None])[:, 0]).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        wasted += int((rewards_GA == rewards_GA[:, :1]).all(1).sum())
        for place, rewards_A in zip(places, rewards_GA, strict=True):
            source.mark_resolved(place)
            if sampler is not None:
                spread = float(np.abs(rewards_A - rewards_A.mean()).mean())
                success = float(rewards_A.mean())
                sampler.observe(
                    GroupOutcome(problem_index=place.problem_index, success=success, spread=spread, version=step)
                )
    return {
        "sampler": name,
        "seed": seed,
        "tokens_to_target": curve[-1]["tokens"] if curve[-1]["success"] >= target else None,
        "groups_without_signal": round(wasted / max(1, GROUPS * step), 3),
        "curve": curve,
    }


def verdicts(runs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Per sampler: the tokens to the target, and whether all of its seeds need fewer than all of `epochs`."""
    tokens: dict[str, list[float]] = {}
    for one in runs:
        tokens.setdefault(one["sampler"], []).append(one["tokens_to_target"] or float("inf"))
    base = tokens.get("epochs", [])
    return {
        name: f"{min(found):,.0f} … {max(found):,.0f}"
        + (", beats epochs" if base and name != "epochs" and max(found) < min(base) else "")
        for name, found in tokens.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=list(SAMPLERS))
    parser.add_argument("--target", type=float, default=0.8, help="held-out success to reach")
    parser.add_argument("--max-steps", type=int, default=600)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for seed in args.seeds:
        for name in args.samplers:
            runs.append(run(name, seed, args.target, args.max_steps))
            found = {"target": args.target, "tokens_to_target": verdicts(runs), "runs": runs}
            args.json.write_text(json.dumps(found, indent=1) + "\n")
            print(name, seed, *(runs[-1][key] for key in ("tokens_to_target", "groups_without_signal")), flush=True)
    for name, text in verdicts(runs).items():
        print(f"{name:8}  {text}")


if __name__ == "__main__":
    main()
