"""Runs of only some roles, the debug modes and `stage: sft`: which each starts, which settings it fixes. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.config.sections import Config
from pipelinerl.records.topics import ACTOR, TRAINING_DATA

WITH_ROLLOUTS = ("actor", "evaluation")
_ROLLOUT_ROLES = ("actor_llm", "actor", "verifier", "environment")
STARTED: Mapping[str, tuple[str, ...]] = {
    "servers": ("actor_llm",),
    "actor": _ROLLOUT_ROLES,
    "evaluation": _ROLLOUT_ROLES,
    "preprocessor": ("preprocessor", "preprocessor_llm"),
    "finetune": ("finetune",),
}
"""Kinds of roles by mode, besides the run's own redis."""
WORKING = {"actor": "actor", "evaluation": "actor", "preprocessor": "preprocessor", "finetune": "finetune"}
"""The kind of role whose end is the end of the run, by mode. Standalone servers end when they are asked to."""
READS = {"preprocessor": ACTOR, "finetune": TRAINING_DATA}
"""The recorded topic that a mode reads."""
NOT_SENT: dict[str, Any] = {"weights.probe": False, "weights.backend": "auto"}
"""No weights travel."""
UNBOUNDED: dict[str, Any] = NOT_SENT | {"max_lag_steps": None}
UNTRACKED: dict[str, Any] = {"tracker": []}
"""Trials of a domain are no runs of an experiment."""
ONE_VERSION: dict[str, Any] = UNBOUNDED | UNTRACKED | {"schedule": "pipeline", "steps_per_phase": 1}
EVALUATION: dict[str, Any] = ONE_VERSION | {
    "eval.at_start": False,
    "eval.at_end": True,
    "eval_every_n_versions": 0,
    "world.preprocessor_fraction": 0,
    "world.share_devices": True,
}
"""As nothing is trained, the servers get every device."""
FIXED: Mapping[str, Mapping[str, Any]] = {
    "servers": NOT_SENT | UNTRACKED,
    "actor": ONE_VERSION,
    "evaluation": EVALUATION,
    "preprocessor": UNBOUNDED | UNTRACKED,
    "finetune": UNBOUNDED,
}
"""Settings by mode that only a whole run can have otherwise."""


SUPERVISED: dict[str, Any] = UNBOUNDED | {
    "schedule": "pipeline",
    "steps_per_phase": 1,
    "world.preprocessor_fraction": 0,
    "world.share_devices": True,
}
"""`stage: sft`: no servers, so that the trainer gets every device."""


def working_kind(config: Config) -> str:
    """The kind of role whose end is the end of the run. Empty: it ends when it is asked to."""
    if config.debug.mode is None:
        return "finetune" if config.stage == "sft" else "actor"
    return WORKING.get(config.debug.mode, "")


def started_kinds(config: Config) -> tuple[str, ...] | None:
    """The kinds of roles that this run starts. None = all of its world."""
    mode, existing = config.debug.mode, config.debug.existing_llms
    if mode is None:
        return ("redis", "preprocessor", "finetune") if config.stage == "sft" else None
    judges = ("preprocessor_llm",) if mode in WITH_ROLLOUTS and judges_are_served(config) else ()
    return ("redis", *judges, *(kind for kind in STARTED[mode] if not (existing and kind == "actor_llm")))


def fixed_settings(config: Config) -> dict[str, Any]:
    """Dotted keys with the values that the mode fixes. Roles that use others' servers need no GPU."""
    mode = config.debug.mode
    if mode is None:
        return SUPERVISED if config.stage == "sft" else {}
    fixed = {**FIXED[mode], **(without_devices(config) if config.debug.existing_llms else {})}
    if mode in WITH_ROLLOUTS and judges_are_served(config):
        fixed.pop("world.preprocessor_fraction", None)  # they judge there, too
    return fixed


def judges_are_served(config: Config) -> bool:
    """Whether servers of the run serve a judge."""
    return any(judge.url is None for judge in config.judges)


def without_devices(config: Config) -> dict[str, Any]:
    """A world on this machine's cores, whose servers others have placed."""
    return {
        "world.accelerator": "cpu",
        "world.cpu_slots": max(config.world.cpu_slots, config.world.replicas),
        "world.preprocessor_fraction": 0,
        "world.share_devices": True,
        "world.nodes_per_server": 1,
    }


def with_settings(container: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a resolved configuration with these dotted keys changed."""
    changed = dict(container)
    for key, value in settings.items():
        *sections, last = key.split(".")
        inside = changed
        for section in sections:
            inside[section] = inside = dict(inside[section])
        inside[last] = value
    return changed


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


DEBUG_RULES = (
    sft_has_conversations,
    streams_come_with_their_mode,
    recorded_streams_become_files,
    existing_servers_come_with_rollouts,
    standalone_on_one_node,
    standalone_from_the_beginning,
    evaluation_has_problems,
    subset_is_not_empty,
)
