"""Rules about the trainer, apart from the objective."""

from pipelinerl.config.engine import TRAITS, engine_of
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len


def sequence_fits_trainer(config: Config) -> str | None:
    longest = max_model_len(config)
    if longest is None or config.finetune.seq_length >= longest:
        return None
    return (
        f"`finetune.seq_length` is {config.finetune.seq_length} but "
        f"`vllm_config.vllm_kwargs.max_model_len` is {longest}: "
        "a sequence that the server makes must fit the trainer; raise the first or lower the second"
    )


def temperature_is_positive(config: Config) -> str | None:
    sampled = config.llm.parameters.get("temperature", 1.0)
    if not isinstance(sampled, int | float) or sampled <= 0:
        return f"`llm.parameters.temperature` is {sampled!r}: training needs a temperature above 0"
    return None


def engine_runs_with_settings(config: Config) -> str | None:
    """Checks a built-in engine. The launcher checks one of the user's own, because its class imports torch."""
    traits = TRAITS.get(engine_of(config, ranks=2))
    return traits.check(config) if traits else None


def sequence_parallel_needs_packing(config: Config) -> str | None:
    if config.finetune.seq_parallel > 1 and not config.finetune.seq_packing:
        return (
            f"`finetune.seq_parallel` is {config.finetune.seq_parallel} but `finetune.seq_packing` is false: "
            "set it to true"
        )
    return None


def compiled_layers_are_whole(config: Config) -> str | None:
    finetune = config.finetune
    if finetune.compile and (finetune.router_replay or finetune.attn_implementation != "auto"):
        return "`finetune.compile` needs `attn_implementation` auto and no `router_replay`"
    if finetune.compile and finetune.gradient_checkpointing == "selective":
        return (
            "`finetune.gradient_checkpointing` is selective, but `finetune.compile` is true, which hides the products "
            "of a layer: set the first to true, false or auto"
        )
    return None


def profiled_steps_are_in_order(config: Config) -> str | None:
    steps = config.finetune.profile_steps
    if steps is None or steps[0] <= steps[1]:
        return None
    return f"`finetune.profile_steps` is {list(steps)}: the first step must not be after the last; exchange them"


def betas_are_rates(config: Config) -> str | None:
    betas = config.finetune.optimizer.betas
    return (
        None
        if all(0 <= beta < 1 for beta in betas)
        else f"`finetune.optimizer.betas` is {betas}: both must be in [0, 1)"
    )


def warmup_without_schedule(config: Config) -> str | None:
    if config.finetune.lr_scheduler_type == "constant" and config.finetune.num_warmup_steps:
        return "finetune.num_warmup_steps has no effect: lr_scheduler_type=constant; use constant_with_warmup"
    return None


def engine_key_without_reader(config: Config) -> str | None:
    engine = engine_of(config, ranks=2)
    for key in sorted(frozenset[str]().union(*(traits.reads for traits in TRAITS.values()))):
        if getattr(config.finetune, key) and engine in TRAITS and key not in TRAITS[engine].reads:
            readers = " or ".join(name for name, traits in TRAITS.items() if key in traits.reads)
            return f"`finetune.{key}` has no effect: only finetune.engine={readers} reads it"
    return None


RULES = (
    sequence_fits_trainer,
    temperature_is_positive,
    engine_runs_with_settings,
    sequence_parallel_needs_packing,
    compiled_layers_are_whole,
    betas_are_rates,
    profiled_steps_are_in_order,
)
HINTS = (
    warmup_without_schedule,
    engine_key_without_reader,
)
