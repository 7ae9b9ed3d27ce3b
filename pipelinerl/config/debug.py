"""Runs of only some roles, the debug modes and `stage: sft`: which each starts, which settings it fixes. Pure."""

from collections.abc import Mapping
from typing import Any

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
