"""Rules about the experiment's own keys: domains, judges, conversations to imitate, schedule, debug modes."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.config.debug import READS, WITH_ROLLOUTS
from pipelinerl.config.keys import declared
from pipelinerl.config.reward_functions import MATH, is_judge, name_of, weights_of
from pipelinerl.config.sections import Config

METRICS_OF_ALL = ("reward", "success", "no_error", "no_answer")
"""Metrics of every rollout (`pipelinerl.rollouts.BaseMetrics`)."""
DOMAIN_NAME_BYTES = 64
"""Longest name of a domain. Names of groups begin with it, and names of files with those, which have 255 bytes."""
SFT_DOMAIN = "sft"
"""Domain of the conversations of `sft.datasets` in records."""
METRIC_GROUPS = ("eval", "failures", "groups_dropped", "loop_blocked_s", "mix", "published_before_miss", "refused")
"""First parts of the actor's own metrics, such as `eval/success`. A domain's are `<domain>/success`."""
REWARDED = "pipelinerl.domains.reward_function.generate_rollout"
CHAT_KEYS = ("rubric", "template", "levels", "votes", "vote", "temperature", "max_tokens")
"""Keys of a judge that asks for an opinion."""


def domains_are_told_apart(config: Config) -> str | None:
    """Refuses names of domains with which two metrics or groups would have one name."""
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


def reward_function_is_played(config: Config) -> str | None:
    """Refuses a reward function that no domain plays or that no judge is, a domain without one, metrics of one name."""
    played = [entry.rollout_policy for entry in config.domains or ()] or [config.actor.rollout_policy]
    if bool(config.reward_function) != (REWARDED in (*played, *config.actor.domain_rollouts.values())):
        if not config.reward_function:
            return f"`reward_function` is not set, but {REWARDED} needs it: name yours, as my_module.score"
        return (
            f"`reward_function` is set, but no domain plays it: use --config-name=reward_function, or {REWARDED} as "
            "`actor.rollout_policy`"
        )
    given = weights_of(config.reward_function)
    judges = {MATH, *(judge.name for judge in config.judges)}
    if unknown := sorted(name for name in given if is_judge(name) and name not in judges):
        return (
            f"`reward_function` has {unknown[0]!r}, which is no judge ({sorted(judges)}): name a function as "
            "module.function, or an entry of `judges`"
        )
    names = [name_of(dotted) for dotted in given]
    for name in names if len(names) > 1 else ():
        if names.count(name) > 1 or name in METRICS_OF_ALL:
            return (
                f"`reward_function`: each of several is a metric of its name, and {name!r} is also another's: rename "
                "the function"
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


def phases_are_conventional(config: Config) -> str | None:
    """Without phases of generation a trainer that waits for a phase of data would starve under `max_lag_steps`."""
    if config.schedule == "pipeline" and config.steps_per_phase != 1:
        return (
            f"`steps_per_phase` is {config.steps_per_phase} but `schedule` is pipeline, which has no phases: "
            "set the first to 1 or the second to conventional"
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


def default_of(name: str) -> Any:
    """The default of a dotted key."""
    return next(key.default for key in declared(Config) if key.name == name)


def subset_is_not_empty(config: Config) -> str | None:
    subset = config.train_subset
    if subset is not None and subset.end <= subset.begin:
        return f"`train_subset` is {subset.begin} to {subset.end}: `end` must be larger than `begin`"
    return None


def sft_has_conversations(config: Config) -> str | None:
    sft, wanted = config.sft, config.stage == "sft" or config.sft.per_step > 0
    if wanted and not sft.datasets:
        key = "stage` is sft" if config.stage == "sft" else f"sft.per_step` is {sft.per_step}"
        return f"`{key}, but `sft.datasets` is empty: name the conversations"
    if sft.datasets and not wanted:
        return "`sft.datasets` has no effect: `sft.per_step` is 0 and `stage` is rl; raise the first, or set stage=sft"
    if config.stage != "sft":
        for name in ("test_datasets", "epochs"):
            if value := getattr(sft, name):
                return f"`sft.{name}` is {value} but `stage` is {config.stage}: it is for stage=sft; remove it"
    if config.stage == "sft" and sft.per_step:
        return (
            f"`sft.per_step` is {sft.per_step} but `stage` is sft: a step then has the batch "
            "(finetune.gradient_accumulation_passes); set it to 0"
        )
    if config.stage == "sft" and config.debug.mode is not None:
        return f"`debug.mode` is {config.debug.mode} but `stage` is sft, which starts two roles itself: set it to null"
    if wanted and config.finetune.rl.advantage == "value":
        return "`finetune.rl.advantage` is value, which learns from every token's reward; conversations have none"
    return None


def streams_come_with_their_mode(config: Config) -> str | None:
    mode, source = config.debug.mode, config.debug.streams_from
    if mode in READS and not source:
        return f"`debug.mode` is {mode}: it reads recorded streams; give their run by `debug.streams_from=RUN`"
    if source and mode not in READS:
        return f"`debug.streams_from` is {source!r} but `debug.mode` is {mode}: only {' and '.join(READS)} read streams"
    if source and Path(source).expanduser().resolve() == Path(config.output_dir).expanduser().resolve():
        return f"`debug.streams_from` is {source!r}, the `output_dir`: choose another folder for this run"
    return None


def recorded_streams_become_files(config: Config) -> str | None:
    if config.debug.streams_from and config.streams.backend != "files":
        return (
            f"`streams.backend` is {config.streams.backend} but `debug.streams_from` is given: recorded streams are "
            "copied into files; set streams=files"
        )
    return None


def existing_servers_come_with_rollouts(config: Config) -> str | None:
    urls, mode = config.debug.existing_llms, config.debug.mode
    if not urls:
        return None
    if mode not in WITH_ROLLOUTS:
        return (
            f"`debug.existing_llms` is {urls} but `debug.mode` is {mode}: only {' and '.join(WITH_ROLLOUTS)} use "
            "running servers; a whole run sends weights to servers of its own"
        )
    wrong = [url for url in urls if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname]
    if wrong:
        return f"`debug.existing_llms` has {wrong[0]!r}: write http://HOST:PORT"
    if len(urls) < config.world.replicas or len(set(urls)) < len(urls):
        return (
            f"`debug.existing_llms` is {urls}: name each server once, and at least `world.replicas`="
            f"{config.world.replicas} of them"
        )
    return None


def standalone_on_one_node(config: Config) -> str | None:
    mode, engine = config.debug.mode, config.launcher.engine
    if mode is not None and engine != "local":
        return (
            f"`debug.mode` is {mode} but `launcher.engine` is {engine}: standalone roles run on one node; "
            "set it to local"
        )
    return None


def standalone_from_the_beginning(config: Config) -> str | None:
    if config.debug.mode is not None and config.resume == "checkpoint":
        return f"`resume` is checkpoint but `debug.mode` is {config.debug.mode}: only a whole run can; use streams"
    return None


def evaluation_has_problems(config: Config) -> str | None:
    named = [domain.test_dataset_names for domain in config.domains or ()] or [config.test_dataset_names]
    if config.debug.mode == "evaluation" and not any(named):
        return "`debug.mode` is evaluation but `test_dataset_names` is empty: name what to evaluate on"
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


RULES = (
    domains_are_told_apart,
    judges_can_judge,
    reward_function_is_played,
    sft_has_conversations,
    streams_come_with_their_mode,
    recorded_streams_become_files,
    existing_servers_come_with_rollouts,
    standalone_on_one_node,
    standalone_from_the_beginning,
    evaluation_has_problems,
    subset_is_not_empty,
    lag_allows_updates,
    phases_are_conventional,
    intervals_fit_the_run,
)
HINTS = (
    interval_without_pipeline,
    last_group_is_cut,
)
