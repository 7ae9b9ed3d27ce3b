"""Checks before a run starts that the trainer's log-probabilities equal those of the model's own ``logits``.

The check runs on a small random copy that is built from the model's configuration. The copy is narrow and has just
enough layers to hold one of each kind, so a 32B model costs no more than a toy. Three things are measured in float32:
how the model changes the products of its head, the trainer's log-probs of documents in rows, and those of packed
documents. An architecture is accepted because its numbers agree, never because of its name.
"""

import argparse
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.image_check import check_images
from pipelinerl.finetune.images import ImageReader, attention_of, takes_images
from pipelinerl.finetune.model import Policy, Tokens
from pipelinerl.finetune.rl.head import LogitMap
from pipelinerl.finetune.small_copy import small_copy

log = logging.getLogger(__name__)

MAX_ERROR = 1e-4
"""Largest allowed difference, in nats, between two computations of one log-prob in float32."""
LENGTHS = (11, 17, 6)
"""Tokens of the compared documents. They are longer than the copy's sliding windows."""
CANDIDATES = (PACKED, "sdpa", "eager")
"""Implementations that `finetune.attn_implementation=auto` tries in this order."""
ON_DEVICE_ONLY = ("flash_attention_2", "flex_attention")
"""Implementations that do not run on a CPU. The engine checks them on its device."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How the trainer computes a model's log-probabilities."""

    attention: str
    """Name of the implementation in transformers."""
    logit_map: LogitMap


def examine(
    source: str | Path,
    *,
    attention: str = "auto",
    packing: bool = True,
    seq_parallel: int = 1,
    trust_remote_code: bool = False,
) -> Architecture:
    """Find how the trainer computes the model at ``source``.

    Args:
        source: a model folder or a name in the local cache.
        attention: `finetune.attn_implementation`.
        packing: `finetune.seq_packing`.
        seq_parallel: `finetune.seq_parallel`.
        trust_remote_code: `trust_remote_code`.
    Raises:
        ConfigError: the trainer's numbers would differ from the model's. The message says what would work.
    """
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    found = examine_config(
        config, attention=attention, packing=packing, seq_parallel=seq_parallel, trust_remote_code=trust_remote_code
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        lm = small_copy(config, trust_remote_code).eval()
    if takes_images(lm):
        if seq_parallel > 1:
            raise ConfigError(
                f"finetune.seq_parallel is {seq_parallel}: {type(lm).__name__} takes images, which ranks cannot share; "
                "set it to 1"
            )
        reader = ImageReader(lm, str(source), trust_remote_code)
        check_images(lm, reader, found.attention, found.logit_map, packing=packing, allowed=MAX_ERROR)
    return found


def examine_config(
    config: Any,
    *,
    attention: str = "auto",
    packing: bool = True,
    seq_parallel: int = 1,
    trust_remote_code: bool = False,
) -> Architecture:
    """As ``examine``, for a transformers configuration that is already loaded."""
    register_attention(PACKED, packed_attention)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        comparison = Comparison(small_copy(config, trust_remote_code))
    if seq_parallel > 1:
        names: tuple[str, ...] = (PACKED,)
    else:
        names = CANDIDATES if attention == "auto" else (attention,)
    found = comparison.choose(names, packing, seq_parallel > 1)
    log.info(
        "event=model_compared model=%s attention=%s %s", type(comparison.lm).__name__, found.attention, found.logit_map
    )
    return found


class Comparison:
    """Compares the log-probs of a small model with those that the trainer computes for it."""

    def __init__(self, lm: PreTrainedModel):
        self.lm = lm.eval()
        self.name = type(lm).__name__
        vocab_size = lm.config.get_text_config().vocab_size
        self.documents = [torch.randint(1, min(vocab_size, 200), (1, length)) for length in LENGTHS]
        self.logit_map = measure_logit_map(lm, self.documents[0])
        with contextlib.suppress(ValueError):  # eager is the reference, sdpa ignores softcaps
            lm.set_attn_implementation("eager")
        with torch.no_grad():
            self.own = [self._own_logprobs(ids) for ids in self.documents]

    def choose(self, names: Sequence[str], packing: bool, sharing: bool = False) -> Architecture:
        """Choose the first of ``names`` that reproduces the model's own log-probs.

        Args:
            names: implementations of attention in transformers.
            packing: whether documents are packed, or laid out one per row.
            sharing: whether ranks share each pack. They need the implementation in ``names``.
        Raises:
            ConfigError: none of them does.
        """
        measure = self.packed_error if packing else self.rows_error
        errors: dict[str, float | str] = {}
        for name in names:
            if name in ON_DEVICE_ONLY:
                self.choose(CANDIDATES, packing=False)
                return Architecture(attention=name, logit_map=self.logit_map)
            errors[name] = measure(name)
            if is_exact(errors[name]):
                return Architecture(attention=name, logit_map=self.logit_map)
        raise ConfigError(self._refusal(errors, packing, sharing))

    def packed_error(self, attention: str) -> float | str:
        """Largest difference of log-probs, in nats, when all documents share one row, or the error that it raised."""
        positions = torch.cat([torch.arange(ids.shape[1]) for ids in self.documents])
        targets = torch.cat([ids[0].roll(-1) for ids in self.documents])
        tokens = Tokens(torch.cat(self.documents, 1), positions[None], targets)
        return self._error(attention, tokens, torch.arange(sum(LENGTHS)))

    def rows_error(self, attention: str) -> float | str:
        """The same with one document per row, padded at the end."""
        width = max(LENGTHS)
        ids = torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in self.documents])
        positions = torch.arange(width).expand(len(LENGTHS), width)
        places = torch.cat([row * width + torch.arange(length) for row, length in enumerate(LENGTHS)])
        return self._error(attention, Tokens(ids, positions, ids.roll(-1, 1).flatten()), places)

    @torch.no_grad()
    def _error(self, attention: str, tokens: Tokens, places: Tensor) -> float | str:
        """``places``: int64, flat grid indices of the documents' tokens. The last of each document has no target."""
        try:
            self.lm.set_attn_implementation(attention_of(self.lm.config, attention))
            policy = Policy(self.lm, chunk=64, logit_map=self.logit_map).eval()
            parts = policy(tokens)[places].split(list(LENGTHS))
        except Exception as error:  # the model's code may raise anything: it cannot be computed this way
            return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
        return max((ours[:-1] - own).abs().max().item() for ours, own in zip(parts, self.own, strict=True))

    def _refusal(self, errors: dict[str, float | str], packing: bool, sharing: bool) -> str:
        tried = ", ".join(f"{n}: {e if isinstance(e, str) else f'off by {e:.2g} nats'}" for n, e in errors.items())
        rows = any(is_exact(self.rows_error(name)) for name in CANDIDATES)
        if not rows:
            return (
                f"model_path: the trainer's log-probs are not those of {self.name}'s own logits ({tried}; {MAX_ERROR} "
                "is allowed): between its layers and its logits is more than a linear head, a scale and a softcap, or "
                "its layers are computed in another way; use a model with such a head"
            )
        if sharing:
            cure = "finetune.seq_parallel=1"
        elif any(is_exact(self.packed_error(name) if packing else self.rows_error(name)) for name in CANDIDATES):
            cure = "finetune.attn_implementation=auto"
        else:
            cure = "finetune.seq_packing=false, which trains one document per row and is exact"
        layout = "packed documents" if packing else "one document per row"
        return f"model_path: {self.name} is not computed right with {layout} ({tried}); set {cure}"

    def _own_logprobs(self, ids: Tensor) -> Tensor:
        logits = self.lm(input_ids=ids, use_cache=False).logits[0]
        return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def is_exact(error: float | str) -> bool:
    """Whether a result of ``packed_error`` or ``rows_error`` is a number of at most ``MAX_ERROR``."""
    return isinstance(error, float) and error <= MAX_ERROR


@torch.no_grad()
def measure_logit_map(lm: PreTrainedModel, ids: Tensor) -> LogitMap:
    """Measure how ``lm`` changes the products of its head, by replacing them with known numbers.

    Args:
        lm: a model with a linear output head.
        ids: int64 [1, L], any input.
    Raises:
        ConfigError: the change is neither a scale nor a softcap.
    """
    head = lm.get_output_embeddings()
    name = type(lm).__name__
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"model_path: {name}'s output head is {type(head).__name__}, a linear layer is needed")
    given = torch.linspace(-400.0, 400.0, head.out_features)
    given[:3] = torch.tensor([2.0**-10, 1.0, 2.0**40])

    def replace(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return given.to(output.dtype).expand_as(output).clone()

    handle = head.register_forward_hook(replace)
    try:
        found = lm(input_ids=ids, use_cache=False).logits[0, 0].float()
    finally:
        handle.remove()
    smallest, one, largest = found[:3].tolist()
    linear = abs(largest / 2.0**40 - one) <= 1e-5 * abs(one)
    logit_map = LogitMap(scale=one) if linear else LogitMap(scale=smallest * 2.0**10, softcap=largest)
    expected = logit_map.apply_(given.clone())
    if found.shape != given.shape or not torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
        raise ConfigError(
            f"model_path: {name} changes its head's products in a way that is neither a scale nor a softcap; use a "
            "model without it"
        )
    return logit_map


def run_quietly(function: Callable[[], Architecture]) -> str | None:
    """The message of a refusal, or None. Silences transformers' remarks about kernels and caches."""
    transformers_logging.set_verbosity_error()
    try:
        function()
    except ConfigError as error:
        return str(error)
    return None


def main() -> None:
    """Print ``{"refusal": text or null}`` as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="`model_path`: a folder or a name in the local cache")
    parser.add_argument("--attention", default="auto", help="`finetune.attn_implementation`")
    parser.add_argument("--rows", action="store_true", help="`finetune.seq_packing` is false")
    parser.add_argument("--seq-parallel", type=int, default=1, help="`finetune.seq_parallel`")
    parser.add_argument("--trust-remote-code", action="store_true", help="`trust_remote_code`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    refusal = run_quietly(
        lambda: examine(
            args.model,
            attention=args.attention,
            packing=not args.rows,
            seq_parallel=args.seq_parallel,
            trust_remote_code=args.trust_remote_code,
        )
    )
    print(json.dumps({"refusal": refusal}))
    sys.exit(0)


if __name__ == "__main__":
    main()
