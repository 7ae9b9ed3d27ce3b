"""Random models of any architecture that are as small as their code allows, for checks of the architecture.

The copy has one layer of each kind, and thresholds so low that short documents cross those that a run's can cross.
"""

import contextlib
import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pipelinerl.errors import ConfigError
from pipelinerl.finetune.model import auto_class, decoder_layers
from pipelinerl.finetune.thresholds import Setting, Threshold, arrange, candidates, crossing_lengths, lower

log = logging.getLogger(__name__)

MAX_PARAMETERS = 2**30
"""Largest number of parameters in a copy. A larger one would take too much of the launcher's memory."""

SIZES = {
    **{"vocab_size": 256, "vocab_size_per_layer_input": 256},
    **{"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    **{"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "index_n_heads": 2},
    **{"attn_logit_softcapping": 2.0},
}
"""Largest values in a copy. Caps are lower than scores, to have an effect. With two heads, keys that sparse attention
chooses among have equal scores, as they have in bfloat16."""


@dataclass(frozen=True, eq=False)
class SmallCopy:
    """A random float32 model of the same architecture, as small as its code allows."""

    lm: PreTrainedModel
    thresholds: tuple[Threshold, ...]
    """Settings that are lowered in it."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of documents that cross every threshold that the run's documents can cross."""
        return crossing_lengths(t.lowered for t in self.thresholds if t.is_crossed)


def small_copy(config: Any, trust_remote_code: bool = False, longest: int | None = None) -> SmallCopy:
    """Make a small copy.

    Args:
        longest: tokens of the run's longest document. None: any number.
    Raises:
        ConfigError: no smaller configuration can be computed.
    """
    problems = []
    for small in small_configs(config):
        try:
            short = _shortened(small, trust_remote_code)
            lm = _build(short, trust_remote_code)
            _compute(copy.deepcopy(lm), 2)
        except Exception as error:  # noqa: BLE001 — incompatible sizes may raise anything in the model's code
            problems.append(f"{type(error).__name__}: {error}")
            log.debug("event=no_copy_of_this_size", exc_info=True)
            continue
        copied = _with_thresholds(lm, short, trust_remote_code, longest)
        randomise(copied.lm)
        return copied
    raise ConfigError(f"model_path: no small copy of {config.model_type} can be computed: {problems[-1]}")


def _with_thresholds(lm: PreTrainedModel, config: Any, trust_remote_code: bool, longest: int | None) -> SmallCopy:
    """The copy ``lm`` of ``config`` with every threshold lowered that leaves its parts as they are and computes."""
    parts = _parts(lm)

    def changed(values: Mapping[Setting, int]) -> Any:
        lowered = copy.deepcopy(config)
        lower(lowered.get_text_config(), values)
        return lowered

    def leaves_parts(setting: Setting) -> bool:
        for value in (setting[1] - 1, setting[1] // 2):
            with contextlib.suppress(Exception):  # the value does not fit the others
                if _parts(_planned(changed({setting: value}), trust_remote_code)) == parts:
                    return True
        return False

    def attempt(settings: Sequence[Setting]) -> SmallCopy | None:
        thresholds = arrange(settings, longest)
        with contextlib.suppress(Exception):  # the model's code may raise anything
            small = changed({(t.name, t.value): t.lowered for t in thresholds})
            copied = SmallCopy(_build(small, trust_remote_code), thresholds)
            tried = copy.deepcopy(copied.lm)  # a forward pass may leave something in it
            _compute(tried, max(copied.lengths))
            return copied if _parts(tried) == parts else None
        return None

    found = [setting for setting in candidates(config.get_text_config()) if setting[0] not in SIZES]
    settings = [setting for setting in found if leaves_parts(setting)]
    copied = attempt(settings)
    if copied is not None:
        return copied
    copied = SmallCopy(lm, ())
    for setting in settings:
        accepted = [(t.name, t.value) for t in copied.thresholds]
        copied = attempt([*accepted, setting]) or copied
    return copied


def _parts(lm: PreTrainedModel) -> Any:
    """Names and types of a model's modules, and names and shapes of what it saves."""
    modules = [(name, type(module).__name__) for name, module in lm.named_modules()]
    return modules, [(name, tuple(tensor.shape)) for name, tensor in lm.state_dict().items()]


@torch.no_grad()
def _compute(lm: PreTrainedModel, length: int) -> None:
    lm.eval()(input_ids=torch.ones(1, length, dtype=torch.int64), use_cache=False)


def small_configs(config: Any) -> Iterator[Any]:
    """Smaller configurations of one architecture: first the narrowest, last the unchanged one."""
    for narrow in (_narrow_head_size, _narrow_heads, _narrow_hidden, lambda _: None):
        small = copy.deepcopy(config)
        text = small.get_text_config()
        for other in (x for x in vars(small).values() if hasattr(x, "num_hidden_layers") and x is not text):
            other.num_hidden_layers = 1
        for name, limit in SIZES.items():
            value = getattr(text, name, None)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                setattr(text, name, min(value, limit))
        for part in (small, text):
            _fit_token_ids(part, text.vocab_size)
        with contextlib.suppress(Exception):  # heads have other names, or differ between layers
            narrow(text)
            yield small
    yield copy.deepcopy(config)


def _narrow_head_size(text: Any) -> None:
    if vars(text).get("head_dim"):
        text.head_dim = min(text.head_dim, 32)
    _narrow_heads(text)


def _narrow_heads(text: Any) -> None:
    """Keep at most two key-value heads with two query heads each."""
    if not getattr(text, "num_attention_heads", None):
        return
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    small_kv = min(kv_heads, 2)
    text.num_attention_heads = small_kv * min(heads // kv_heads, 2)
    if getattr(text, "num_key_value_heads", None):
        text.num_key_value_heads = small_kv
    text.hidden_size = text.num_attention_heads * head_dim


def _narrow_hidden(text: Any) -> None:
    """Narrow the hidden size, for models that derive the sizes of their heads from it."""
    text.hidden_size = max(text.hidden_size // 16, 64)


def _fit_token_ids(config: Any, vocab_size: int) -> None:
    for name in [n for n in vars(config) if n.endswith(("_token_id", "_token_index"))]:
        value = getattr(config, name)
        if name == "pad_token_id" and value is not None:
            config.pad_token_id = 0
        elif isinstance(value, int) and value >= vocab_size:
            setattr(config, name, vocab_size - 1)


def _shortened(config: Any, trust_remote_code: bool) -> Any:
    """Keep the first layers up to one of each kind, or all if the configuration counts layers from the end."""
    text = config.get_text_config()
    if getattr(text, "num_kv_shared_layers", 0):
        return config
    layers = decoder_layers(_planned(config, trust_remote_code))
    kinds = [_kind(layer) for layer in layers]
    needed = max(2, 1 + max(kinds.index(kind) for kind in set(kinds)))
    total = text.num_hidden_layers
    if len(layers) != total or needed >= total:
        return config
    for name, value in list(vars(text).items()):
        if isinstance(value, (list, tuple)) and len(value) == total:
            setattr(text, name, type(value)(value[:needed]))
    text.num_hidden_layers = needed
    return config


def _kind(layer: nn.Module) -> str:
    """A text that two layers share if their types, settings and shapes are equal. Ignores the layer's index."""
    modules = []
    for name, module in layer.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str)) and "idx" not in k}
        modules.append((name, type(module).__name__, sorted(settings.items())))
    return repr((modules, [(name, tuple(p.shape)) for name, p in layer.named_parameters()]))


def _build(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    count = sum(p.numel() for p in _planned(config, trust_remote_code).parameters())
    if count > MAX_PARAMETERS:
        raise ConfigError(f"the copy has {count} parameters, more than {MAX_PARAMETERS}")
    return auto_class(config).from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)


def _planned(config: Any, trust_remote_code: bool) -> PreTrainedModel:
    """The model without memory."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code)


@torch.no_grad()
def randomise(lm: PreTrainedModel) -> None:
    """Set random weights with which every part affects the result. Matrices preserve the scale of activations."""
    for parameter in lm.parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim >= 2:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        else:
            # Without the half, normalised queries and keys give so large scores that rounding errors grow by layer.
            parameter.mul_(0.5).add_(0.1 * noise)
