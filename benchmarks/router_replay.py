"""KL divergence between server and trainer of a tiny mixture of experts, with and without router replay.

    python -m benchmarks.router_replay --out benchmarks/router_replay.json

The server is stood in for by the model in bfloat16, which samples nothing but scores given tokens. The trainer computes
in float32 or under bfloat16 autocast from the float32 weights, whose rounded values the server has. Its scores of
experts differ by rounding, so it chooses some others.
"""

import argparse
import contextlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from pipelinerl.finetune.model import decoder_layers
from pipelinerl.finetune.router_replay import RouterReplay

SIZES = {
    **{"vocab_size": 2048, "hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.1},
}


def make_model(experts: int, chosen: int, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", num_experts=experts, num_experts_per_tok=chosen, **SIZES)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()


def record_experts(lm: nn.Module) -> list[Tensor]:
    """A list that every forward pass fills with the experts of each layer, [N, k]."""
    found: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        found.append(outputs[2].clone())

    for layer in decoder_layers(lm):
        layer.mlp.gate.register_forward_hook(keep)
    return found


@torch.no_grad()
def log_probs(lm: nn.Module, ids: Tensor) -> Tensor:
    """float32 [N, V]"""
    return lm(ids, use_cache=False).logits[0].float().log_softmax(-1)


def compare(experts: int, chosen: int, num_tokens: int, autocast: bool) -> dict[str, Any]:
    """Mean KL(server ‖ trainer) per token, and the share of (token, layer) whose set of experts differs."""
    server, trainer = make_model(experts, chosen, torch.bfloat16), make_model(experts, chosen, torch.float32)
    ids = torch.randint(0, SIZES["vocab_size"], (1, num_tokens))
    servers, trainers = record_experts(server), record_experts(trainer)
    replay = RouterReplay(decoder_layers(trainer))
    theirs = log_probs(server, ids)
    precision = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else contextlib.nullcontext
    found: dict[str, Any] = {"experts": experts, "per_token": chosen, "tokens": num_tokens}
    found["trainer"] = "bfloat16 autocast" if autocast else "float32"
    for name in ("without", "with"):
        replay.announce(torch.cat(servers, 1).to(torch.int16) if name == "with" else None)
        trainers.clear()
        with precision():
            ours = log_probs(trainer, ids)
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        other = [(a.sort(1)[0] != b.sort(1)[0]).any(1).float().mean() for a, b in zip(servers, trainers, strict=True)]
        found[name] = {
            "kl_mean": kl.mean().item(),
            "kl_max": kl.max().item(),
            "logprob_max": (theirs - ours).gather(1, ids[0, :, None]).abs().max().item(),
            "differing_choices": torch.stack(other).mean().item(),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    results = []
    for experts, chosen in ((8, 2), (32, 4), (128, 8)):
        for autocast in (False, True):
            results.append(compare(experts, chosen, args.tokens, autocast))
            print(json.dumps(results[-1]), flush=True)
    if args.out:
        args.out.write_text(json.dumps({"results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
