"""The trainer's engine: what `finetune.engine` means, and what is known of an engine.

An engine is a class by its dotted name. A built-in one has a short name in front. Light: what the launcher, the plan
and the checks must know of a built-in engine stands here, so that none of them imports torch.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelinerl.config.backends import ENGINES
from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.paths import CONF_DIR
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError

ADAMW = "adamw"
"""The built-in optimizer, the only one that DeepSpeed shards."""
MUON = "muon"
"""Muon for the layers' matrices, which must be whole on every rank, and AdamW for the rest."""


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Properties of an engine that are needed before it is built. The defaults are those of an engine of one's own.

    A class names its traits in the attribute `traits` (`pipelinerl.finetune.engines.base.Engine`).
    """

    memory: str = "pipelinerl.plan.training_memory.EngineMemory"
    """Dotted name of the class that estimates what a rank holds, derived from this one. The default replicates."""
    shards_only_adamw: bool = False
    """Whether other optimizers than `adamw` are refused."""
    always_in_a_group: bool = False
    """Whether a single rank needs a process group, too."""
    loads_whole_with_adapters: bool = False
    """Whether every rank reads the whole model where adapters are trained, instead of its own part."""
    max_ranks: int | None = None
    """The most trainer ranks that it sums gradients over. None: any number."""
    reads: frozenset[str] = frozenset()
    """Keys of `finetune` that other engines do not read."""
    check: Callable[[Config], str | None] = lambda config: None
    """Returns why the engine cannot run with this configuration: key, value and fix. None: it can."""


def deepspeed_file(config: Config) -> Path:
    """Returns the file that `deepspeed_config` names. An absolute path stays absolute."""
    return CONF_DIR / "deepspeed" / f"{config.deepspeed_config}.json"


def zero_settings(config: Config) -> dict[str, Any]:
    """`zero_optimization` of the DeepSpeed file; empty where it does not exist."""
    path = deepspeed_file(config)
    return json.loads(path.read_text(encoding="utf-8")).get("zero_optimization", {}) if path.is_file() else {}


def zero_stage(config: Config) -> int:
    """Returns the ZeRO stage in the DeepSpeed file. 0 if the file does not exist or names no stage."""
    return int(zero_settings(config).get("stage", 0))


def _check_deepspeed(config: Config) -> str | None:
    if not deepspeed_file(config).is_file():
        names = sorted(path.stem for path in (CONF_DIR / "deepspeed").glob("*.json"))
        return f"`deepspeed_config` is {config.deepspeed_config!r}: conf/deepspeed has {', '.join(names) or 'no files'}"
    if config.finetune.dtype == "float16":
        return "`finetune.dtype` is float16, in which DeepSpeed is not tested: set `finetune.engine` to fsdp2 or ddp"
    if config.finetune.compile and zero_stage(config) == 3:
        return "`finetune.compile` is true but ZeRO-3 gathers layers by itself: set `finetune.engine` to fsdp2 or ddp"
    return None


def _check_sharded(config: Config) -> str | None:
    if config.finetune.compile and (config.finetune.expert_ranks or 1) > 1:
        return "`finetune.compile` is true, but with `finetune.expert_ranks` layers are not compiled: set it to false"
    if config.finetune.optimizer.name == MUON:
        return "`finetune.optimizer.name` is muon, whose steps need whole matrices: set `finetune.engine` to ddp"
    return None


TRAITS = {
    "ddp": EngineTraits(memory="pipelinerl.plan.training_memory.ReplicatedMemory"),
    "deepspeed": EngineTraits(
        memory="pipelinerl.plan.training_memory.ZeroMemory",
        shards_only_adamw=True,
        always_in_a_group=True,
        loads_whole_with_adapters=True,
        check=_check_deepspeed,
    ),
    "fsdp2": EngineTraits(
        memory="pipelinerl.plan.training_memory.ShardedMemory",
        always_in_a_group=True,
        reads=frozenset({"shard_gradients", "cpu_offload", "shard_ranks", "expert_ranks"}),
        check=_check_sharded,
    ),
}
"""Traits of the built-in engines, whose classes name them, too."""


def engine_of(config: Config, ranks: int) -> str:
    """Returns the short or dotted name of the engine for this number of ranks.

    ``auto`` is DeepSpeed, ``fsdp2`` in float16, and ``ddp`` for one rank.
    """
    if config.finetune.engine != "auto":
        return config.finetune.engine
    several = "fsdp2" if config.finetune.dtype == "float16" else "deepspeed"
    return several if ranks > 1 else "ddp"


def engine_class(name: str) -> Any:
    """Imports the class of an engine, which imports torch.

    Raises:
        ConfigError: ``name`` is no class, or one without the traits of an engine.
    """
    try:
        found: Any = resolve_function(ENGINES.get(name, name))
    except ConfigError as error:
        raise ConfigError(f"`finetune.engine`: {error}") from error
    if not isinstance(getattr(found, "traits", None), EngineTraits):
        raise ConfigError(
            f"`finetune.engine` is {name}, which is no engine: derive the class from "
            "pipelinerl.finetune.engines.base.Engine"
        )
    return found


def traits_of(name: str) -> EngineTraits:
    """Returns the traits of an engine. Only one of the user's own is imported for it.

    Raises:
        ConfigError: ``name`` is no engine.
    """
    return TRAITS[name] if name in TRAITS else engine_class(name).traits


def check_ranks(config: Config, ranks: int) -> None:
    """Refuse an engine that cannot run with the settings or with this number of ranks.

    Raises:
        ConfigError: which setting it is.
    """
    name = engine_of(config, ranks)
    traits = traits_of(name)
    problem = traits.check(config)
    if problem:
        raise ConfigError(problem)
    if traits.max_ranks is not None and ranks > traits.max_ranks:
        raise ConfigError(
            f"`finetune.engine` is {name}, which trains on at most {traits.max_ranks} rank(s), but this world has "
            f"{ranks}: lower world.finetune_fraction, or choose another engine"
        )
    sharing = config.finetune.shard_ranks
    if sharing and "shard_ranks" in traits.reads and ranks % sharing:
        raise ConfigError(
            f"`finetune.shard_ranks` is {sharing}, which does not divide the trainer's {ranks} ranks: set it to a "
            "divisor, such as the GPUs of a node, or to null"
        )
    dividing = config.finetune.expert_ranks
    if dividing and "expert_ranks" in traits.reads and (sharing or ranks) % dividing:
        raise ConfigError(
            f"`finetune.expert_ranks` is {dividing}, which does not divide the {sharing or ranks} ranks that share a "
            "copy of the weights: set it to a divisor, such as the GPUs of a node, or to null"
        )
