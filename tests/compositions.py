"""Configurations are composed in a hundredth of a second: nearly every test starts from one.

Hydra reads and merges 16 files for each. Here it does so once for each experiment and choice of groups. Values on the
command line are applied to a copy, by Hydra's own function. Whatever else is asked for is left to Hydra: folders of the
user's own, and overrides of Hydra's settings. Processes that a test starts compose as ever.
"""

import pickle
from collections.abc import Sequence
from functools import cache
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from pipelinerl.config.paths import CONF_DIR

compose_anew = hydra.compose


def compose(config_name: str, overrides: Sequence[str] = (), **options: Any) -> DictConfig:
    """What `hydra.compose` returns, or raises."""
    if options or not is_packaged():
        return compose_anew(config_name, overrides=list(overrides), **options)
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    if any(override.is_hydra_override() or override.is_sweep_override() for override in parsed):
        return compose_anew(config_name, overrides=list(overrides))
    values = [override for override in parsed if is_value(override)]
    cfg = pickle.loads(composed(config_name, *(o.input_line for o in parsed if o not in values)))
    ConfigLoaderImpl._apply_overrides_to_config(values, cfg)
    return cfg


def is_packaged() -> bool:
    """Whether Hydra looks into the packaged folder alone."""
    places = GlobalHydra.instance().config_loader().get_search_path().get_path()
    own = [place.path for place in places if place.provider in ("main", "pipelinerl")]
    return own == [str(CONF_DIR)]


def is_value(override: Override) -> bool:
    """Whether it sets a key, and chooses no file of a group."""
    return override.package is None and not (CONF_DIR / override.key_or_group.replace(".", "/")).is_dir()


@cache
def composed(config_name: str, *choices: str) -> bytes:
    return pickle.dumps(compose_anew(config_name, overrides=list(choices)))
