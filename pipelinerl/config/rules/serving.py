"""Rules about vLLM's own options and the way of weights."""

from pipelinerl.config.environment import checked_variables
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError


def server_variables_are_of_their_types(config: Config) -> str | None:
    literal = {name: value for name, value in config.vllm_config.env.items() if isinstance(value, str)}
    try:
        checked_variables(literal)
    except ConfigError as error:
        return f"`vllm_config.env`: {error}"
    return None


def server_defaults_are_neutral(config: Config) -> str | None:
    value = config.vllm_config.vllm_kwargs.get("generation-config")
    if value == "vllm":
        return None
    return (
        f"`vllm_config.vllm_kwargs.generation-config` is {value!r}: the model's own sampling defaults "
        "(top-p, top-k, …) would distort training; set it to vllm"
    )


def deltas_in_store_are_said(config: Config) -> str | None:
    """`auto` compares the times of transfers, which the trainer of a store does not see."""
    weights = config.weights
    if weights.backend == "store" and weights.delta == "auto":
        return "`weights.delta` is auto but `weights.backend` is store: set the first to true or false"
    return None


def store_is_reached_by_all(config: Config) -> str | None:
    """With streams on Redis, roles may run on machines that do not see the run folder."""
    if config.weights.backend == "store" and config.weights.store is None and config.streams.backend != "files":
        return (
            f"`weights.store` is null, which is a folder in the run folder, but `streams.backend` is "
            f"{config.streams.backend}, where servers need not see it: set the first to a folder or URL that all reach"
        )
    return None


def store_without_backend(config: Config) -> str | None:
    if config.weights.store is not None and config.weights.backend != "store":
        return f"weights.store has no effect: weights.backend={config.weights.backend}"
    return None


RULES = (
    server_variables_are_of_their_types,
    server_defaults_are_neutral,
    deltas_in_store_are_said,
    store_is_reached_by_all,
)
HINTS = (store_without_backend,)
