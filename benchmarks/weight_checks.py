"""False alarms and misses of the weight probe over bfloat16 models of 24 layers, and the step that log-probs can show.

    python -m benchmarks.weight_checks [--updates 200] [--faults 100] [--out benchmarks/weight_checks.json]

Trainer and server are one model in two sets of kernels: the trainer packs the text into one row (sdpa), the server
scores it in batches that change, with eager attention and products cut at places that depend on the batch. The server
keeps its weights as vLLM does with two tensor-parallel workers: q, k, v and gate, up in one matrix each, half of it.
Every update moves each float32 weight by ± the learning rate, as Adam does, and sends it in bfloat16. Faults are
put into one update and undone. What decides is the code of `pipelinerl.weights`.
"""

import argparse
import copy
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.weights.layout import Layout, StripeBuffer, spec_of
from pipelinerl.weights.load.learning import learn
from pipelinerl.weights.load.live_check import differing
from pipelinerl.weights.transfer.checksum import checksum
from pipelinerl.weights.transfer.shard import LoadPlan, staged_copies
from pipelinerl.weights.verify.calibration import calibrate, check_version

LAYERS, HIDDEN, VOCAB, WORKERS = 24, 64, 512, 2
ROWS, LENGTH = 4, 256
TOLERANCE = 0.2
FAULTS = ("swallowed", "swapped pair", "cast twice", "stale shard")
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
BY_COLUMNS = ("o_proj", "down_proj")


def make_model(logit_deviation: float, seed: int = 0) -> Qwen2ForCausalLM:
    """Random float32 weights; logits of the given standard deviation."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        initializer_range=0.075,
    )
    model = Qwen2ForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(logit_deviation / model(torch.randint(0, VOCAB, (2, 64))).logits.std())
    return model


@torch.no_grad()
def sample(model: Qwen2ForCausalLM) -> torch.Tensor:
    """int64 [S, L] at temperature 1."""
    cache, parts = DynamicCache(), [torch.randint(0, VOCAB, (ROWS, 1))]
    for _ in range(LENGTH - 1):
        logits = model(parts[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        parts.append(torch.multinomial(logits.softmax(-1), 1))
    return torch.cat(parts, 1)


@torch.no_grad()
def score(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [S, L−1], with a float32 head."""
    hidden = model.model(input_ids=ids, position_ids=positions, use_cache=False)[0]
    logprobs = (hidden.float() @ model.lm_head.weight.float().T).log_softmax(-1)
    return logprobs[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


class Worker(nn.Module):
    """One tensor-parallel worker's parameters and the loaders that fill them."""

    def __init__(self, whole: dict[str, torch.Tensor], rank: int, device: str):
        super().__init__()
        self.rank, self.places = rank, {}
        sizes: dict[str, tuple[int, ...]] = {}
        for name, tensor in whole.items():
            target, shape = self._target(name), tuple(self._shard(name, tensor).shape)
            row = sizes[target][0] if target in sizes else 0
            self.places[name] = (target, row, shape[0])
            sizes[target] = (row + shape[0], *shape[1:])
        for target, size in sizes.items():
            empty = torch.zeros(size, dtype=torch.bfloat16, device=device)
            self.register_parameter(target.replace(".", "/"), nn.Parameter(empty, requires_grad=False))

    def load(self, params: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in params:
            self.part(name).copy_(self._shard(name, tensor))

    def part(self, name: str) -> torch.Tensor:
        """The live elements that come from one sent tensor."""
        target, row, rows = self.places[name]
        return self._parameters[target.replace(".", "/")].data.narrow(0, row, rows)

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1 and "bias" not in name:
            return tensor
        dim = 1 if any(part in name for part in BY_COLUMNS) else 0
        size = tensor.shape[dim] // WORKERS
        return tensor.narrow(dim, self.rank * size, size)

    @staticmethod
    def _target(name: str) -> str:
        for source, target in FUSED.items():
            name = name.replace(source, target)
        return name


class SplitLinear(nn.Linear):
    """A product whose terms are added in an order that depends on the batch."""

    splits = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.splits == 1:
            return super().forward(x)
        size = -(-self.in_features // self.splits)
        parts = zip(x.split(size, -1), self.weight.split(size, 1), strict=True)
        y = sum((part @ weight.T for part, weight in parts), torch.zeros((), dtype=x.dtype))
        return y if self.bias is None else y + self.bias


class StandIn:
    """Trainer and server of one run."""

    def __init__(self, logit_deviation: float, seed: int = 0):
        self.master = make_model(logit_deviation, seed)
        self.ids = sample(self.master)
        self.rng = np.random.default_rng(seed)
        self.trainer = copy.deepcopy(self.master).bfloat16()
        self.server = copy.deepcopy(self.master).bfloat16()
        self.server.set_attn_implementation("eager")
        for module in self.server.modules():
            if type(module) is nn.Linear:
                module.__class__ = SplitLinear
        whole = self.sent()
        self.layout = Layout(tuple(spec_of(*item) for item in whole.items()))
        self.workers = [Worker(whole, rank, "cpu") for rank in range(WORKERS)]
        self.plans = [self._learn(whole, rank) for rank in range(WORKERS)]
        self.staged = torch.zeros(self.layout.num_bytes, dtype=torch.uint8)
        self.receive()
        self.load()

    def _learn(self, whole: dict[str, torch.Tensor], rank: int) -> LoadPlan:
        bare = Worker(whole, rank, "meta")
        return learn(bare, bare.load, self.layout.specs)

    def sent(self) -> dict[str, torch.Tensor]:
        return {name: tensor.bfloat16() for name, tensor in self.master.named_parameters()}

    def step(self, learning_rate: float) -> None:
        generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        for parameter in self.master.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1)
            parameter.add_(signs, alpha=learning_rate)
        self.trainer.load_state_dict(self.sent())

    def receive(self) -> None:
        StripeBuffer(self.layout, self.staged).fill(self.sent().items())

    def load(self) -> None:
        for worker in self.workers:
            worker.load(self.layout.views(self.staged))

    def trainer_scores(self) -> np.ndarray:
        positions = torch.arange(LENGTH).repeat(ROWS)[None]
        row = self.ids.reshape(1, -1)
        parts = score(self.trainer, row, positions)
        keep = torch.ones(ROWS * LENGTH - 1, dtype=torch.bool)
        keep[LENGTH - 1 :: LENGTH] = False
        return parts[0, keep].numpy()

    def server_scores(self) -> np.ndarray:
        """Under a batch that nobody chose."""
        with torch.no_grad():
            for name, parameter in self.server.named_parameters():
                parts = [worker.part(name) for worker in self.workers]
                if parts[0].shape == parameter.shape:
                    parameter.copy_(parts[0])
                else:
                    parameter.copy_(torch.cat(parts, 1 if any(part in name for part in BY_COLUMNS) else 0))
        rows: list[torch.Tensor] = []
        while len(rows) < ROWS:
            SplitLinear.splits, count = int(self.rng.integers(1, 5)), int(self.rng.integers(1, ROWS + 1))
            batch = self.ids[len(rows) : len(rows) + count]
            extra = torch.from_numpy(self.rng.integers(0, VOCAB, (int(self.rng.integers(0, 3)), LENGTH)))
            rows += list(score(self.server, torch.cat([extra, batch]))[len(extra) :])
        return torch.stack(rows).flatten().numpy()

    def digest_fault(self) -> bool:
        """Whether the trainer would find a fault from the digest alone."""
        expected = torch.zeros_like(self.staged)
        StripeBuffer(self.layout, expected).fill(self.sent().items())
        if checksum(self.staged) != checksum(expected):
            return True
        return any(
            next(differing(staged_copies(self.layout, plan, None), dict(worker.named_parameters()), self.staged), None)
            is not None
            for plan, worker in zip(self.plans, self.workers, strict=True)
        )

    def spoil(self, fault: str) -> None:
        """Take an update as a faulty server would. The version before is live."""
        before = {name: [w.part(name).clone() for w in self.workers] for name, _ in self.layout.views(self.staged)}
        self.receive()
        if fault == "swallowed":
            return
        self.load()
        names = list(before)
        if fault == "swapped pair":
            first = f"model.layers.{self.rng.integers(LAYERS)}.self_attn.k_proj.weight"
            for worker in self.workers:
                a, b = worker.part(first), worker.part(first.replace("k_proj", "v_proj"))
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)
        elif fault == "cast twice":
            for name in names:
                for worker in self.workers:
                    worker.part(name).copy_(worker.part(name).half())
        elif fault == "stale shard":
            rank = int(self.rng.integers(WORKERS))
            worker = self.workers[rank]
            moved = [name for name in names if not torch.equal(before[name][rank], worker.part(name))]
            name = moved[self.rng.integers(len(moved))]
            worker.part(name).copy_(before[name][rank])


def campaign(logit_deviation: float, learning_rate: float, updates: int, faults: int, scored_faults: int) -> dict:
    """Healthy updates, then faults of each kind, each undone before the next."""
    run = StandIn(logit_deviation)
    baseline, first = calibrate(run.server_scores(), run.trainer_scores(), TOLERANCE)
    alarms, ratios, largest = int(bool(first.fault)), [], 0.0
    for _ in range(updates):
        run.step(learning_rate)
        run.receive()
        run.load()
        server, trainer = run.server_scores(), run.trainer_scores()
        largest = max(largest, float(np.abs(server - trainer).max()))
        baseline, verdict = check_version(baseline, server, trainer)
        ratios.append(verdict.difference / verdict.limit)
        alarms += bool(verdict.fault) or run.digest_fault()
    found = {}
    for fault in FAULTS:
        by_digest = by_logprobs = either = 0
        for trial in range(faults):
            run.step(learning_rate)
            run.spoil(fault)
            digest = run.digest_fault()
            scored = trial < scored_faults and bool(
                check_version(baseline, run.server_scores(), run.trainer_scores())[1].fault
            )
            by_digest, by_logprobs, either = by_digest + digest, by_logprobs + scored, either + (digest or scored)
            run.receive()
            run.load()
            baseline, _ = (
                check_version(baseline, run.server_scores(), run.trainer_scores()) if scored else (baseline, None)
            )
        found[fault] = {
            "found": either,
            "of": faults,
            "by_digest": by_digest,
            "by_logprobs": by_logprobs,
            "of_scored": min(scored_faults, faults),
        }
    return {
        "logit_deviation": logit_deviation,
        "learning_rate": learning_rate,
        "updates": updates,
        "false_alarms": alarms,
        "noise_nats": first.difference,
        "largest_token_difference_nats": largest,
        "largest_share_of_limit": max(ratios, default=0.0),
        "faults": found,
    }


def visibility(logit_deviation: float, trials: int) -> list[dict[str, Any]]:
    """Missed updates found by log-probabilities alone, by the size of the step."""
    rows = []
    for learning_rate in (1e-6, 1e-5, 1e-4, 3e-4, 1e-3):
        run = StandIn(logit_deviation)
        baseline, first = calibrate(run.server_scores(), run.trainer_scores(), TOLERANCE)
        exact, found, sizes = run.master, 0, []
        for _ in range(trials):
            before = score(exact, run.ids)
            run.step(learning_rate)
            sizes.append(float((score(exact, run.ids) - before).square().mean().sqrt()))
            found += bool(check_version(baseline, run.server_scores(), run.trainer_scores())[1].fault)
            run.receive()
            run.load()
            baseline, _ = check_version(baseline, run.server_scores(), run.trainer_scores())
        size = math.sqrt(sum(size**2 for size in sizes) / trials)
        rows.append(
            {
                "logit_deviation": logit_deviation,
                "learning_rate": learning_rate,
                "step_nats": size,
                "step_over_noise": size / first.difference,
                "found": found,
                "of": trials,
            }
        )
    return rows


def main(argv: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument(
        "--scored-faults", type=int, default=10, help="faults that log-probabilities are asked about too"
    )
    parser.add_argument("--trials", type=int, default=10, help="missed updates per step size")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"layers": LAYERS, "tokens": ROWS * (LENGTH - 1), "campaigns": [], "missed_updates": []}
    for deviation in (1.0, 4.0):
        for learning_rate in (1e-6, 1e-5):
            result["campaigns"].append(
                campaign(deviation, learning_rate, args.updates, args.faults, args.scored_faults)
            )
            say(json.dumps(result["campaigns"][-1]))
        result["missed_updates"] += visibility(deviation, args.trials)
        for row in result["missed_updates"][-5:]:
            say(json.dumps(row))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
