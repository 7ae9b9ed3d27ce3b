"""Gives the trainer the factors of `longrope` (arXiv:2402.13753) that vLLM uses, for any documents that share a pack.

transformers chooses the short or the long factors by the longest document of a forward pass, vLLM once, by
`max_model_len`. So both lists of the configuration become those of vLLM. Exported models get the file's lists back.
"""

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

from pipelinerl.errors import ConfigError

log = logging.getLogger(__name__)

SAVED = "pipelinerl_saved_rope"
"""Attribute of a rewritten configuration: its rope settings as they are in the model's file."""
SETTINGS = ("rope_parameters", "rope_scaling")
"""Attributes with rope settings. transformers reads the first, the code of some models the second."""


def fix_longrope(config: Any, max_model_len: int | None, *, has_reference: bool = False) -> None:
    """Rewrite a configuration with longrope in place. Others are left alone.

    Args:
        config: of transformers.
        max_model_len: of the run's servers.
        has_reference: whether the run has reference servers. Their `max_model_len` is larger by 1.
    Raises:
        ConfigError: ``max_model_len`` is None, or policy and reference servers would take different factors.
    """
    text = config.get_text_config()
    if hasattr(text, SAVED) or not any(_longropes(text)):
        return
    if max_model_len is None:
        raise ConfigError(
            "`vllm_config.vllm_kwargs.max_model_len` is null: by it vLLM chooses between the short and the long "
            "factors of this model's longrope, and so must the trainer; set it"
        )
    saved = {name: copy.deepcopy(vars(text)[name]) for name in SETTINGS if name in vars(text)}
    for rope in _longropes(text):
        limit = _original_length(text, rope)
        if has_reference and max_model_len == limit:
            raise ConfigError(
                f"`vllm_config.vllm_kwargs.max_model_len` is {max_model_len}, which is the model's "
                "original_max_position_embeddings: reference servers take one token more, so they would compute with "
                f"the long factors of longrope and the policy's servers with the short ones; set it to {limit - 1}"
            )
        side = "long" if max_model_len > limit else "short"
        scale = rope.get(f"{side}_mscale")
        if scale is None:
            scale = _attention_scale(text.max_position_embeddings, limit)
        rope |= {"short_factor": rope[f"{side}_factor"], "long_factor": rope[f"{side}_factor"]}
        rope |= {name: scale for name in ("short_mscale", "long_mscale") if name in rope} | {"attention_factor": scale}
        log.info(
            "event=longrope_fixed factors=%s max_model_len=%d original_max_position_embeddings=%d attention_scale=%.6g",
            side,
            max_model_len,
            limit,
            scale,
        )
    setattr(text, SAVED, saved)


def restore_longrope(config: Any) -> None:
    """Give a rewritten configuration the rope settings of its file back, in place."""
    text = config.get_text_config()
    for name, value in vars(text).pop(SAVED, {}).items():
        setattr(text, name, value)


def _longropes(text: Any) -> Iterator[dict[str, Any]]:
    """The rope settings with two lists of factors. They may be given for each type of layer."""
    for name in SETTINGS:
        settings = vars(text).get(name)
        if isinstance(settings, dict):
            nested = [value for value in settings.values() if isinstance(value, dict)]
            yield from (rope for rope in (settings, *nested) if {"short_factor", "long_factor"} <= rope.keys())


def _original_length(text: Any, rope: dict[str, Any]) -> int:
    """`original_max_position_embeddings`. In transformers and vLLM the attribute of the configuration comes first."""
    given = getattr(text, "original_max_position_embeddings", None)
    return given or rope.get("original_max_position_embeddings") or text.max_position_embeddings


def _attention_scale(longest: int, original: int) -> float:
    """vLLM's factor of cosines and sines: √(1 + ln(longest / original) / ln(original))."""
    return math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original else 1.0
