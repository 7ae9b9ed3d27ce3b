"""Checks before a run starts that the trainer's log-probabilities equal those of the model's own ``logits``.

Measures a small random copy of the model in float32 (``small_copy``): how it changes the products of its head, and the
log-probs of documents in rows and of packed ones. An architecture is accepted because its numbers agree, never because
of its name (docs/algorithms.md §7).
"""

import argparse
import contextlib
import copy
import json
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.attention import PACKED, packed_attention, register_attention
from pipelinerl.finetune.data import with_shared_prefixes
from pipelinerl.finetune.engines.experts import expert_modules
from pipelinerl.finetune.image_check import check_images
from pipelinerl.finetune.images import ImageReader, attention_of, takes_images
from pipelinerl.finetune.longrope import fix_longrope
from pipelinerl.finetune.model import Policy, Tokens
from pipelinerl.finetune.rl.head import LogitMap
from pipelinerl.finetune.small_copy import SmallCopy, small_copy
from pipelinerl.finetune.thresholds import Threshold

log = logging.getLogger(__name__)

MAX_ERROR = 1e-4
"""Largest allowed difference, in nats, between two computations of one log-prob in float32."""
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


def examine(source: str | Path, *, trust_remote_code: bool = False, **settings: Any) -> Architecture:
    """As ``examine_config``, with the images of the model at ``source``, a folder or a name in the local cache."""
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    return examine_config(config, source=str(source), trust_remote_code=trust_remote_code, **settings)


def examine_config(
    config: Any,
    *,
    source: str | None = None,
    attention: str = "auto",
    packing: bool = True,
    seq_parallel: int = 1,
    share_prefixes: bool = False,
    trust_remote_code: bool = False,
    longest: int | None = None,
    has_reference: bool = False,
    divides_experts: bool = False,
) -> Architecture:
    """Find how the trainer computes a model.

    Args:
        config: of transformers.
        source: folder or name of the model, to try its images. None: they are not tried.
        attention: `finetune.attn_implementation`.
        share_prefixes: whether a prefix that documents have in common is computed once.
        longest: `max_model_len` of the run's servers, the tokens of its longest document. None: any number.
        has_reference: whether the run has reference servers.
        divides_experts: whether ranks divide the experts of a layer.

    Raises:
        ConfigError: the trainer's numbers would differ from the model's. The message names what would work.
    """
    register_attention(PACKED, packed_attention)
    config = copy.deepcopy(config)
    fix_longrope(config, longest, has_reference=has_reference)

    def compare(longest: int | None) -> Comparison:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(0)
            return Comparison(small_copy(config, trust_remote_code, longest))

    comparison = compare(longest)
    lm = comparison.lm
    if seq_parallel > 1:
        names: tuple[str, ...] = (PACKED,)
    else:
        names = CANDIDATES if attention == "auto" else (attention,)
    found = comparison.choose(names, packing, seq_parallel > 1, compare)
    log.info(
        "event=model_compared model=%s attention=%s %s crossed=%s",
        type(lm).__name__,
        found.attention,
        found.logit_map,
        ",".join(f"{threshold.name}:{threshold.value}" for threshold in comparison.crossed) or None,
    )
    if share_prefixes and packing:
        comparison.refuse_shared_prefixes(found.attention)
    if divides_experts:
        expert_modules(lm)
    if source is not None and takes_images(lm):
        if seq_parallel > 1:
            raise ConfigError(
                f"finetune.seq_parallel is {seq_parallel}: {type(lm).__name__} takes images, which ranks cannot share; "
                "set it to 1"
            )
        reader = ImageReader(lm, source, trust_remote_code)
        check_images(lm, reader, found.attention, found.logit_map, packing=packing, allowed=MAX_ERROR)
    return found


class Comparison:
    """Compares the log-probs of a small model with those that the trainer computes for it."""

    def __init__(self, copied: SmallCopy):
        self.lm = lm = copied.lm.eval()
        with contextlib.suppress(ValueError):  # eager is the reference, sdpa ignores softcaps
            lm.set_attn_implementation("eager")
        self.name = type(lm).__name__
        self.crossed = tuple(threshold for threshold in copied.thresholds if threshold.is_crossed)
        self.lengths = copied.lengths
        vocab_size = lm.config.get_text_config().vocab_size
        self.documents = [torch.randint(1, min(vocab_size, 200), (1, length)) for length in self.lengths]
        self.logit_map = measure_logit_map(_unused(lm), self.documents[0])
        self.own = [self._own_logprobs(ids) for ids in self.documents]

    def choose(
        self,
        names: Sequence[str],
        packing: bool,
        sharing: bool = False,
        shorter: "Callable[[int], Comparison] | None" = None,
    ) -> Architecture:
        """Choose the first of ``names`` that reproduces the model's own log-probs.

        Args:
            names: implementations of attention in transformers.
            packing: whether documents are packed, or laid out one per row.
            sharing: whether ranks share each pack. They need the implementation in ``names``.
            shorter: compares documents of at most this many tokens of the run. A refusal names the exact length.
        Raises:
            ConfigError: none of them does.
        """
        measure = self.packed_error if packing else self.rows_error
        errors: dict[str, float | str] = {}
        for name in names:
            if name in ON_DEVICE_ONLY:
                self.choose(CANDIDATES, packing=False)
                return self._accepted(name)
            errors[name] = measure(name)
            if is_exact(errors[name]):
                return self._accepted(name)
        raise ConfigError(self._refusal(errors, packing, sharing, shorter))

    def _accepted(self, attention: str) -> Architecture:
        return Architecture(attention=attention, logit_map=self.logit_map)

    def packed_error(self, attention: str) -> float | str:
        """Largest difference of log-probs, in nats, when all documents share one row, or the error that it raised."""
        positions = torch.cat([torch.arange(ids.shape[1]) for ids in self.documents])
        targets = torch.cat([ids[0].roll(-1) for ids in self.documents])
        tokens = Tokens(torch.cat(self.documents, 1), positions[None], targets)
        return self._error(attention, tokens, torch.arange(sum(self.lengths)))

    def rows_error(self, attention: str) -> float | str:
        """The same with one document per row, padded at the end."""
        width = max(self.lengths)
        ids = torch.cat([nn.functional.pad(x, (0, width - x.shape[1])) for x in self.documents])
        positions = torch.arange(width).expand(len(self.lengths), width)
        places = torch.cat([row * width + torch.arange(length) for row, length in enumerate(self.lengths)])
        return self._error(attention, Tokens(ids, positions, ids.roll(-1, 1).flatten()), places)

    def shared_error(self, attention: str) -> float | str:
        """The same with the first half of each document computed as a document of its own."""
        halves = np.array(self.lengths) // 2
        lengths = np.stack([halves, self.lengths], 1).ravel()
        shared = np.stack([np.zeros_like(halves), halves], 1).ravel()
        layout = with_shared_prefixes(lengths, np.arange(len(lengths)), shared)
        flat_T = torch.from_numpy(layout.flat_T)
        whole = flat_T.split(lengths.tolist())[1::2]
        ids_N, targets_N = (flat_T.new_zeros(layout.grid[1]) for _ in range(2))
        for rows, ids in zip(whole, self.documents, strict=True):
            ids_N[rows], targets_N[rows] = ids[0], ids[0].roll(-1)
        tokens = Tokens(
            ids_N[None],
            torch.from_numpy(layout.position_ids),
            targets_N,
            layout.documents,
            layout.keys,
            torch.from_numpy(layout.key_rows_E),
        )
        return self._error(attention, tokens, torch.cat(whole))

    def refuse_shared_prefixes(self, attention: str) -> None:
        """Raise ``ConfigError`` unless common prefixes may be computed once."""
        error = self.shared_error(attention) if attention == PACKED else f"its attention is {attention}"
        if not is_exact(error):
            said = error if isinstance(error, str) else f"off by {error:.2g} nats"
            raise ConfigError(
                f"finetune.share_prefixes: {self.name} cannot compute a common prefix once ({said}); set it to off"
            )

    @torch.no_grad()
    def _error(self, attention: str, tokens: Tokens, places: Tensor) -> float | str:
        """``places``: int64, flat grid indices of the documents' tokens. The last of each document has no target."""
        try:
            lm = _unused(self.lm)
            lm.set_attn_implementation(attention_of(lm.config, attention))
            policy = Policy(lm, chunk=64, logit_map=self.logit_map).eval()
            parts = policy(tokens)[places].split(list(self.lengths))
        except Exception as error:  # noqa: BLE001 — the model's code may raise anything: it cannot be computed this way
            return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:120]}"
        return max((ours[:-1] - own).abs().max().item() for ours, own in zip(parts, self.own, strict=True))

    def _refusal(
        self,
        errors: dict[str, float | str],
        packing: bool,
        sharing: bool,
        shorter: "Callable[[int], Comparison] | None",
    ) -> str:
        tried = ", ".join(f"{n}: {e if isinstance(e, str) else f'off by {e:.2g} nats'}" for n, e in errors.items())
        rows = any(is_exact(self.rows_error(name)) for name in CANDIDATES)
        if not rows and shorter is not None and (limit := self._exact_up_to(shorter, packing)) is not None:
            return (
                f"model_path: the trainer's log-probs of a document of more than {limit.name}={limit.value} tokens are "
                f"not those of {self.name} alone ({tried}; {MAX_ERROR} is allowed): they depend on the documents "
                "beside it, or on the order of equal scores; set vllm_config.vllm_kwargs.max_model_len to at most "
                f"{limit.value}"
            )
        if not rows:
            return (
                f"model_path: the trainer's log-probs are not those of {self.name}'s own logits ({tried}; {MAX_ERROR} "
                "is allowed): between its layers and its logits is more than a linear head, a scale and a softcap, or "
                "its layers are computed in another way; use a model with such a head"
            )
        if sharing:
            fix = "finetune.seq_parallel=1"
        elif any(is_exact(self.packed_error(name) if packing else self.rows_error(name)) for name in CANDIDATES):
            fix = "finetune.attn_implementation=auto"
        else:
            fix = "finetune.seq_packing=false, which trains one document per row and is exact"
        layout = "packed documents" if packing else "one document per row"
        return f"model_path: {self.name} is not computed right with {layout} ({tried}); set {fix}"

    def _exact_up_to(self, shorter: "Callable[[int], Comparison]", packing: bool) -> Threshold | None:
        """The largest threshold up to whose value documents are exact. None: not even the shortest are."""
        for threshold in reversed(self.crossed):
            other = shorter(threshold.value)
            measure = other.packed_error if packing else other.rows_error
            if any(is_exact(measure(name)) for name in CANDIDATES):
                return threshold
        return None

    @torch.no_grad()
    def _own_logprobs(self, ids: Tensor) -> Tensor:
        logits = _unused(self.lm)(input_ids=ids, use_cache=False).logits[0]
        return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def _unused(lm: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares the parameters, but not what a forward pass leaves, such as frequencies of dynamic rope."""
    return copy.deepcopy(lm, {id(parameter): parameter for parameter in lm.parameters()})


def is_exact(error: float | str) -> bool:
    """Whether a result of ``packed_error`` or ``rows_error`` is a number of at most ``MAX_ERROR``."""
    return isinstance(error, float) and error <= MAX_ERROR


@torch.no_grad()
def measure_logit_map(lm: PreTrainedModel, ids: Tensor) -> LogitMap:
    """Measure how ``lm`` changes the products of its linear head, by replacing them with known numbers.

    ``ids``: int64 [1, L], any input.

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
    """Print ``{"refusal": text or null}`` as the last line. The options are ``examine``'s arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", dest="source", required=True, help="`model_path`: a folder or a name in the cache")
    parser.add_argument("--attention", default="auto", help="`finetune.attn_implementation`")
    parser.add_argument("--rows", dest="packing", action="store_false", help="`finetune.seq_packing` is false")
    parser.add_argument("--share-prefixes", action="store_true", help="`finetune.share_prefixes` is in effect")
    parser.add_argument("--seq-parallel", type=int, default=1, help="`finetune.seq_parallel`")
    parser.add_argument("--longest", type=int, help="`max_model_len` of the servers")
    parser.add_argument("--has-reference", action="store_true", help="the run has reference servers")
    parser.add_argument("--divides-experts", action="store_true", help="`finetune.expert_ranks` is above 1")
    parser.add_argument("--trust-remote-code", action="store_true", help="`trust_remote_code`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps({"refusal": run_quietly(lambda: examine(**vars(args)))}))
    sys.exit(0)


if __name__ == "__main__":
    main()
