"""Constraints that cross sections, each a named function, and hints about settings that do nothing.

A rule returns the text of its refusal or None. A hint returns the text of its warning or None. Texts name the keys, the
values, the constraint and the fix.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.config.backends import WITH_KEYS_OF_THEIR_OWN
from pipelinerl.config.debug import DEBUG_RULES
from pipelinerl.config.engine import TRAITS, engine_of
from pipelinerl.config.environment import checked_variables
from pipelinerl.config.keys import declared
from pipelinerl.config.objective_rules import OBJECTIVE_HINTS, OBJECTIVE_RULES
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len, server_options, side_models
from pipelinerl.errors import ConfigError

Rule = Callable[[Config], str | None]

DISTORTING: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "min_tokens": (0,),
    "thinking_token_budget": (),
    "structured_outputs": (),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
}
"""Sampling parameters that make the sampled distribution another one than the trained one, and their neutral values."""


METRICS_OF_ALL = ("reward", "success", "no_error", "no_answer")
"""Metrics of every rollout (`pipelinerl.rollouts.BaseMetrics`)."""
DOMAIN_NAME_BYTES = 64
"""Longest name of a domain: it is in the name of every group, of which files have their names."""
SFT_DOMAIN = "sft"
"""Domain of the conversations of `sft.datasets` in records."""
METRIC_GROUPS = ("eval", "failures", "groups_dropped", "loop_blocked_s", "mix", "published_before_miss", "refused")
"""First parts of the actor's own metrics, such as `eval/success`. A domain's are `<domain>/success`."""
WANDB_CHARS, WANDB_TAG_CHARS, NOT_IN_WANDB_PROJECTS = 128, 64, "/\\#?%:"
"""What wandb takes: characters of a project, a group or a name, of a tag, and what is in no project's name."""
WANDB_ROLE_CHARS = 20
"""Room for the role behind a run's name, such as `_preprocessor_12`."""
CHAT_KEYS = ("rubric", "template", "levels", "votes", "vote", "temperature", "max_tokens")
"""Keys of a judge that asks for an opinion."""


def check_rules(config: Config) -> None:
    """Raise one `ConfigError` that names every broken rule."""
    refusals = [text for rule in RULES if (text := rule(config))]
    if refusals:
        raise ConfigError("; ".join(refusals))


def hints(config: Config) -> list[str]:
    """Warnings about settings without effect or with a cost."""
    return [text for hint in HINTS if (text := hint(config))]


def sequence_fits_trainer(config: Config) -> str | None:
    longest = max_model_len(config)
    if longest is None or config.finetune.seq_length >= longest:
        return None
    return (
        f"`finetune.seq_length` is {config.finetune.seq_length} but "
        f"`vllm_config.vllm_kwargs.max_model_len` is {longest}: "
        "a sequence that the server makes must fit the trainer; raise the first or lower the second"
    )


def micro_batch_bytes(config: Config) -> int:
    """Ids, log-probabilities, advantages and reference log-probabilities take 16 bytes of a token."""
    return config.finetune.seq_length * 16


def micro_batch_fits_record(config: Config) -> str | None:
    """A backend of the user's own has a limit of its own, which `launcher.checks` compares."""
    needed = micro_batch_bytes(config)
    limit = config.streams.max_record_mb << 20
    if needed <= limit or config.streams.backend not in WITH_KEYS_OF_THEIR_OWN:
        return None
    return (
        f"`streams.max_record_mb` is {config.streams.max_record_mb} but a micro-batch of "
        f"`finetune.seq_length`={config.finetune.seq_length} tokens takes {needed / 2**20:.1f} MB: "
        "raise the first or lower the second"
    )


def completion_fits_server(config: Config) -> str | None:
    longest = max_model_len(config)
    for name, section in (("llm", config.llm), ("test_llm", config.test_llm)):
        tokens = section.parameters.get("max_tokens")
        if longest is not None and isinstance(tokens, int) and tokens >= longest:
            return (
                f"`{name}.parameters.max_tokens` is {tokens} but `vllm_config.vllm_kwargs.max_model_len` is {longest}: "
                "nothing is left for the prompt; lower the first or raise the second"
            )
    return None


def server_variables_are_of_their_types(config: Config) -> str | None:
    literal = {name: value for name, value in config.vllm_config.env.items() if isinstance(value, str)}
    try:
        checked_variables(literal)
    except ConfigError as error:
        return f"`vllm_config.env`: {error}"
    return None


def max_tokens_given(config: Config) -> str | None:
    for name, section in (("llm", config.llm), ("test_llm", config.test_llm)):
        tokens = section.parameters.get("max_tokens")
        if not isinstance(tokens, int) or tokens < 1:
            return f"`{name}.parameters.max_tokens` is {tokens!r}: it must be a whole number of at least 1"
    return None


def distortions(parameters: Mapping[str, Any]) -> list[str]:
    """Names of the sampling parameters that change the distribution, apart from the temperature."""
    return sorted(name for name, neutral in DISTORTING.items() if parameters.get(name) not in (None, *neutral))


def sampling_is_undistorted(config: Config) -> str | None:
    """Training needs log-probabilities of the distribution that was sampled from (docs/algorithms.md §7)."""
    parameters = config.llm.parameters
    wrong = distortions(parameters)
    if not wrong:
        return None
    values = ", ".join(f"`llm.parameters.{name}`={parameters[name]!r}" for name in wrong)
    return f"{values}: training samples from the whole distribution; remove it (test_llm.parameters may have it)"


def server_defaults_are_neutral(config: Config) -> str | None:
    value = server_options(config).get("generation-config")
    if value == "vllm":
        return None
    return (
        f"`vllm_config.vllm_kwargs.generation-config` is {value!r}: the model's own sampling defaults "
        "(top-p, top-k, …) would distort training; set it to vllm"
    )


def temperature_is_one_value(config: Config) -> str | None:
    sampled, trained = config.llm.parameters.get("temperature", 1.0), config.finetune.rl.temperature
    if not isinstance(sampled, int | float) or sampled <= 0:
        return f"`llm.parameters.temperature` is {sampled!r}: training needs a temperature above 0"
    if not math.isclose(sampled, trained):
        return (
            f"`finetune.rl.temperature` is {trained} but `llm.parameters.temperature` is {sampled}: "
            "the trainer must use the "
            "sampling temperature; leave the first at its default"
        )
    return None


def lag_allows_updates(config: Config) -> str | None:
    bound, interval = config.max_lag_steps, config.finetune.weight_update_interval
    if bound is None:
        return None
    if config.schedule == "pipeline" and bound < interval - 1:
        return (
            f"`max_lag_steps` is {bound} but `finetune.weight_update_interval` is {interval}: weights "
            f"that are {interval - 1} "
            "steps old could never be used; raise the first or lower the second"
        )
    if config.schedule == "conventional" and bound < config.steps_per_phase - 1:
        return (
            f"`max_lag_steps` is {bound} but `steps_per_phase` is {config.steps_per_phase}: the last "
            "step of a phase trains data "
            f"that is {config.steps_per_phase - 1} steps old; raise the first or lower the second"
        )
    return None


def intervals_fit_the_run(config: Config) -> str | None:
    """The defaults suit runs of any length. An interval longer than the run was probably meant in samples."""
    if config.debug.mode is not None:
        return None
    steps = config.finetune.max_train_steps
    for name, interval in (
        ("eval_every_n_versions", config.eval_every_n_versions),
        ("finetune.weight_update_interval", config.finetune.weight_update_interval),
    ):
        if interval > max(steps, default_of(name)):
            return (
                f"`{name}` is {interval} optimizer steps but `finetune.max_train_steps` is {steps}, so it never "
                f"happens: lower the first, or write '{interval} samples' if it is PipelineRL's"
            )
    return None


def default_of(name: str) -> int:
    return next(key.default for key in declared(Config) if key.name == name)


def one_engine(config: Config) -> str | None:
    if config.use_deepspeed and config.use_fsdp and config.finetune.engine == "auto":
        return "`use_deepspeed` and `use_fsdp` are both true: choose one, set the other to false"
    return None


def engine_runs_with_settings(config: Config) -> str | None:
    """Of a built-in engine. One of the user's own is asked by the launcher, because its class imports torch."""
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


def overlong_buffer_fits(config: Config) -> str | None:
    buffer, tokens = config.preprocess.overlong_buffer_tokens, config.llm.parameters.get("max_tokens")
    if isinstance(tokens, int) and buffer >= tokens:
        return (
            f"`preprocess.overlong_buffer_tokens` is {buffer} but `llm.parameters.max_tokens` is "
            f"{tokens}: every completion "
            "would be penalised; lower the first"
        )
    return None


def external_redis_has_address(config: Config) -> str | None:
    streams = config.streams
    if streams.external and (streams.backend != "redis" or streams.host is None or streams.port is None):
        return "`streams.external` is true: it needs streams=redis, `streams.host` and `streams.port`"
    return None


def tls_files_are_complete(config: Config) -> str | None:
    world = config.world
    given = [world.tls_cert, world.tls_key, world.tls_ca]
    if any(given) and not (world.tls and all(given)):
        return (
            "`world.tls_cert`, `world.tls_key` and `world.tls_ca` go together, with `world.tls` true: set all of them, "
            "or none to have certificates made from the run's secret"
        )
    return None


def head_precision_agrees(config: Config) -> str | None:
    if config.fp32_lm_head != config.finetune.fp32_lm_head:
        return (
            f"`fp32_lm_head` is {config.fp32_lm_head} but `finetune.fp32_lm_head` is "
            f"{config.finetune.fp32_lm_head}: server and "
            "trainer must compute the head alike; leave the second at its default"
        )
    return None


def betas_are_rates(config: Config) -> str | None:
    betas = config.finetune.optimizer.betas
    return (
        None
        if all(0 <= beta < 1 for beta in betas)
        else f"`finetune.optimizer.betas` is {betas}: both must be in [0, 1)"
    )


def filter_knows_advantages(config: Config) -> str | None:
    if config.preprocess.filter_zero_advantage_groups and config.finetune.rl.advantage == "value":
        return (
            "`preprocess.filter_zero_advantage_groups` has no effect: `finetune.rl.advantage` is value, which only the "
            "trainer knows; set the first to false"
        )
    return None


def phases_are_conventional(config: Config) -> str | None:
    """Without phases of generation a trainer that waits for a phase of data would starve under `max_lag_steps`."""
    if config.schedule == "pipeline" and config.steps_per_phase != 1:
        return (
            f"`steps_per_phase` is {config.steps_per_phase} but `schedule` is pipeline, which has no phases: "
            "set the first to 1 or the second to conventional"
        )
    return None


def ray_shares_no_device(config: Config) -> str | None:
    if config.launcher.engine == "ray" and config.world.share_devices:
        return "`world.share_devices` is true but Ray gives a GPU to one role only: use launcher.engine=local"
    return None


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


def renderer_is_alone(config: Config) -> str | None:
    """Refuses a family's code beside a chat template, or for conversations to imitate, which a template renders."""
    for name, section in (("llm", config.llm), ("test_llm", config.test_llm)):
        if section.renderer is not None and section.chat_template is not None:
            return f"`{name}.renderer` is {section.renderer} and `{name}.chat_template` is set: remove one of them"
    if config.llm.renderer is not None and (config.stage == "sft" or config.sft.per_step):
        return (
            f"`llm.renderer` is {config.llm.renderer}, but `sft.datasets` are rendered with the chat template: set it "
            "to null, or train on rollouts alone"
        )
    return None


def judges_can_judge(config: Config) -> str | None:
    """Refuses judges of one name, without a server, with keys of the other kind, or whose opinions are all alike."""
    names = [judge.name for judge in config.judges]
    for judge in config.judges:
        entry = f"`judges` entry {judge.name!r}"
        if names.count(judge.name) > 1:
            return f"{entry} is there {names.count(judge.name)} times: give every judge a name of its own"
        if judge.name in METRICS_OF_ALL:
            return f"{entry} has the name of a metric of every rollout: choose another"
        if judge.url is not None and (urlsplit(judge.url).scheme not in ("http", "https") or urlsplit(judge.url).query):
            return f"{entry} has url={judge.url}: give http(s)://host[:port][/path] without a query"
        if judge.url is None and config.world.preprocessor_fraction == 0:
            return f"{entry} has no `url`, and `world.preprocessor_fraction` is 0: set one of them"
        if judge.votes > 1 and judge.temperature == 0:
            return (
                f"{entry} has votes={judge.votes} and temperature=0: all opinions would be the same; raise the second"
            )
        if judge.template is not None and not all(place in judge.template for place in ("{question}", "{answer}")):
            return f"{entry} has a template without {{question}} or {{answer}}: add both places"
        fields = type(judge).model_fields
        changed = [k for k in CHAT_KEYS if getattr(judge, k) != fields[k].get_default(call_default_factory=True)]
        if judge.kind == "reward" and changed:
            return f"{entry} has {', '.join(changed)}, which only kind=chat reads: remove it"
    return None


def domains_are_told_apart(config: Config) -> str | None:
    """Refuses names of domains that are equal, or that metrics and groups could not be told apart by."""
    names = [domain.name for domain in config.domains or ()]
    for name in names:
        entry = f"`domains` entry {name!r}"
        if names.count(name) > 1:
            return f"{entry} is there {names.count(name)} times: give every domain a name of its own"
        if not name.isprintable() or "/" in name or name != name.strip() or not name:
            return f"{entry} has a name with a slash, a control character or spaces around it, or none: choose another"
        if len(name.encode()) > DOMAIN_NAME_BYTES:
            return f"{entry} has a name of {len(name.encode())} bytes: choose one of at most {DOMAIN_NAME_BYTES}"
        if name in METRIC_GROUPS:
            return f"{entry} has a name with which metrics of the run begin (`{name}/…`): choose another"
        if name == SFT_DOMAIN and config.sft.datasets:
            return f"{entry} has the name of the conversations of `sft.datasets`: choose another"
    return None


def wandb_takes_its_names(config: Config) -> str | None:
    """Refuses names that wandb refuses, which it would do in the run, without its curves from then on."""
    if "wandb" not in config.trackers:
        return None
    names = config.wandb
    project = names.wandb_project_name
    if not project or len(project) > WANDB_CHARS or set(project) & set(NOT_IN_WANDB_PROJECTS):
        return (
            f"`wandb.wandb_project_name` is {project!r}: use 1 to {WANDB_CHARS} characters, without "
            f"{' '.join(NOT_IN_WANDB_PROJECTS)}"
        )
    for key, longest in (("wandb_group", WANDB_CHARS), ("wandb_name", WANDB_CHARS - WANDB_ROLE_CHARS)):
        if len(value := getattr(names, key) or "") > longest:
            return f"`wandb.{key}` is {value!r}, {len(value)} characters: use at most {longest}"
    for tag in names.tags:
        if not 1 <= len(tag) <= WANDB_TAG_CHARS:
            return f"`wandb.tags` has {tag!r}, {len(tag)} characters: use 1 to {WANDB_TAG_CHARS}"
    return None


def sampler_takes_its_arguments(config: Config) -> str | None:
    if config.actor.sampler is None and config.actor.sampler_kwargs:
        return (
            f"`actor.sampler_kwargs` is {config.actor.sampler_kwargs} but `actor.sampler` is null: name the function "
            "that takes them, or remove them"
        )
    return None


RULES: tuple[Rule, ...] = (
    server_variables_are_of_their_types,
    renderer_is_alone,
    domains_are_told_apart,
    judges_can_judge,
    wandb_takes_its_names,
    deltas_in_store_are_said,
    store_is_reached_by_all,
    tls_files_are_complete,
    micro_batch_fits_record,
    *OBJECTIVE_RULES,
    *DEBUG_RULES,
    max_tokens_given,
    sequence_fits_trainer,
    completion_fits_server,
    sampling_is_undistorted,
    server_defaults_are_neutral,
    temperature_is_one_value,
    lag_allows_updates,
    intervals_fit_the_run,
    one_engine,
    engine_runs_with_settings,
    sequence_parallel_needs_packing,
    compiled_layers_are_whole,
    overlong_buffer_fits,
    external_redis_has_address,
    head_precision_agrees,
    betas_are_rates,
    filter_knows_advantages,
    phases_are_conventional,
    ray_shares_no_device,
    sampler_takes_its_arguments,
)


def reference_without_kl(config: Config) -> str | None:
    if config.world.preprocessor_fraction > 0 and not side_models(config):
        return (
            "world.preprocessor_fraction gives devices to a reference server that nothing uses: kl_coef and "
            "final_kl_coef are 0, and there are no teachers or judges"
        )
    return None


def address_without_redis(config: Config) -> str | None:
    streams = config.streams
    if streams.backend == "files" and (streams.host is not None or streams.port is not None):
        return "streams.host and streams.port have no effect: streams=files"
    return None


def options_without_own_backend(config: Config) -> str | None:
    streams = config.streams
    if streams.options and streams.backend in WITH_KEYS_OF_THEIR_OWN:
        return f"streams.options has no effect: streams.backend is {streams.backend}, which has keys of its own"
    return None


def interval_without_pipeline(config: Config) -> str | None:
    interval = config.finetune.weight_update_interval
    if config.schedule == "conventional" and interval != 1:
        return (
            f"finetune.weight_update_interval={interval} has no effect: schedule=conventional pushes after each phase"
        )
    return None


def last_group_is_cut(config: Config) -> str | None:
    """With no lag to spare, the samples of a phase's last group that its batches have no room for are too old."""
    samples = config.batch_size * config.steps_per_phase
    rest = samples % config.attempts
    if not rest or config.max_lag_steps != config.steps_per_phase - 1 or config.finetune.batch_unit == "texts":
        return None
    return (
        f"attempts={config.attempts} does not divide the {samples} samples that are generated at a time, and "
        f"max_lag_steps={config.max_lag_steps} lets none wait: {config.attempts - rest} of the group that ends last, "
        "often the one with the longest rollout, are dropped each time"
    )


def warmup_without_schedule(config: Config) -> str | None:
    if config.finetune.lr_scheduler_type == "constant" and config.finetune.num_warmup_steps:
        return "finetune.num_warmup_steps has no effect: lr_scheduler_type=constant; use constant_with_warmup"
    return None


def engine_overrides_choice(config: Config) -> str | None:
    engine = config.finetune.engine
    if engine != "auto" and (
        (config.use_deepspeed and engine != "deepspeed") or (config.use_fsdp and engine != "fsdp2")
    ):
        return f"use_deepspeed and use_fsdp have no effect: finetune.engine={engine}"
    return None


def engine_key_without_reader(config: Config) -> str | None:
    engine = engine_of(config, ranks=2)
    for key in sorted(frozenset[str]().union(*(traits.reads for traits in TRAITS.values()))):
        if getattr(config.finetune, key) and engine in TRAITS and key not in TRAITS[engine].reads:
            readers = " or ".join(name for name, traits in TRAITS.items() if key in traits.reads)
            return f"`finetune.{key}` has no effect: only finetune.engine={readers} reads it"
    return None


def cluster_without_ray(config: Config) -> str | None:
    if config.launcher.ray_address is not None and config.launcher.engine != "ray":
        return f"launcher.ray_address has no effect: launcher.engine={config.launcher.engine}"
    return None


def store_without_backend(config: Config) -> str | None:
    if config.weights.store is not None and config.weights.backend != "store":
        return f"weights.store has no effect: weights.backend={config.weights.backend}"
    return None


HINTS: tuple[Rule, ...] = (
    store_without_backend,
    *OBJECTIVE_HINTS,
    reference_without_kl,
    address_without_redis,
    options_without_own_backend,
    interval_without_pipeline,
    last_group_is_cut,
    warmup_without_schedule,
    engine_overrides_choice,
    engine_key_without_reader,
    cluster_without_ray,
)
