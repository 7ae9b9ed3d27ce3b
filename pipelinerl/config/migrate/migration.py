"""From an experiment of PipelineRL to one of this project. Every difference is reported.

The table of keys is `pipelinerl.config.renames`. Here is what depends on several keys, or on the `defaults` list.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import Any

from pipelinerl.config.dotted import resolve_function
from pipelinerl.config.keys import declared
from pipelinerl.config.load import config_keys, is_free_form, nearest_key
from pipelinerl.config.names import NAMES, TARGET
from pipelinerl.config.nested import map_texts, with_settings
from pipelinerl.config.renames import DOTTED_NAMES, LEFT_OUT, NO_EQUIVALENT, SAME_DOMAINS, Rename, rename_of
from pipelinerl.config.rules.experiment import default_of
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError

VALUE_HEAD = "causal-language-modeling-with-value-head"
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "grpo": {"finetune.attempts": 8, "finetune.rl.policy_loss": "ppo"},
    "ppo": {
        "finetune.model_class": VALUE_HEAD,
        "finetune.attempts": 1,
        "finetune.rl.value_loss_coef": 0.1,
        "finetune.rl.policy_loss": "ppo",
    },
    "actor_critic": {
        "finetune.model_class": VALUE_HEAD,
        "finetune.attempts": 1,
        "finetune.rl.value_loss_coef": 0.1,
    },
}
"""PipelineRL's files of `finetune`, beyond its base."""
REWARDS = {"success_and_format": "success_within_limit"}
"""PipelineRL's files of `rewards` that have another name here."""
OWN_BASE: Mapping[str, Any] = {
    "eval_every_n_versions": 78000,
    "test_llm.parameters.top_p": 0.95,
    "test_llm.parameters.top_k": 50,
}
"""Values of PipelineRL's base.yaml, without its `finetune`, that matter and differ."""
SEQ_LENGTH, MAX_MODEL_LEN = "finetune.seq_length", "vllm_config.vllm_kwargs.max_model_len"
BATCH = {"finetune.train_batch_size": 1, "finetune.gradient_accumulation_passes": 1024}
LENGTHS = {SEQ_LENGTH: 12000, MAX_MODEL_LEN: 10000}
MAX_TRAIN_STEPS = 100_000
EPSILON = 0.02
"""PipelineRL's values of these keys, where a file does not set them."""
REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.\-]*)\}")
EXTRA_KEYS = "extra_keys"
LOADER_PARAMETERS = "dataset_loader_params"
NAME_LISTS = ("train_dataset_names", "test_dataset_names")
"""One name is a list of one here."""
ENVIRONMENT_REPLICAS = ("world.env_replicas_per_actor", "world.env_replicas")
VERIFIERS = "world.verifier_replicas"
DOMAIN_ROLLOUTS = "actor.domain_rollouts"
DOMAIN_MIX = "actor.domain_mix"
MIX_BY_HAND = "write `domains`, a list with a `weight` each; the names of the data sets do not say their domain"
DISPATCHER = "pipelinerl.domains.dispatcher.generate_multidomain_rollout"
LAGS = ("max_lag", "finetune.max_lag")
INTERVAL, STEPS, INTERRUPTION = (
    f"finetune.{name}" for name in ("weight_update_interval", "max_train_steps", "interrupt_train_steps")
)
AGGREGATION = "finetune.rl.aggregation"
ONE_TEXT = (
    "pipelinerl.domains.math.generate_math_rollout",
    "pipelinerl.domains.pipelinerl_games.counting.generate_rollout",
)
"""Rollouts of one training text, for which a batch of rollouts is a batch of texts."""
BATCH_UNIT = "finetune.batch_unit"
TEXTS = (
    f"{BATCH_UNIT}: texts and {AGGREGATION}: sum_over_texts: a batch and its loss count training texts, as there. The "
    "texts of a rollout stay in one step, so a batch ends with the rollout that fills it"
)
MATH = "pipelinerl.domains.math."
OF_A_DOMAIN = re.compile(r"^pipelinerl\.domains\.(\w+)\.")
"""A function or class of one of PipelineRL's domains."""
OPEN = ("rewards", "vllm_config.vllm_kwargs", "llm.parameters", "test_llm.parameters")
"""Mappings of the user's in which PipelineRL has keys of its own."""


@dataclass
class Migration:
    """The new experiment, and what was done to get there."""

    defaults: list[Any] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Dotted key → value."""
    changed: list[str] = field(default_factory=list)
    needless: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def forget(self, keys: Iterable[str], reported: "Migration | None" = None) -> None:
        """Leaves out values, and the lines that another migration reports already."""
        for key in keys:
            del self.values[key]
        if reported is not None:
            for lines, known in zip(self.lines(), reported.lines(), strict=True):
                lines[:] = [line for line in lines if line not in known]

    def lines(self) -> tuple[list[str], list[str], list[str]]:
        return self.changed, self.needless, self.missing

    def document(self) -> dict[str, Any]:
        """As it is written: nested, the `defaults` first."""
        return with_settings({"defaults": self.defaults}, self.values)


def migrate(old: Mapping[str, Any]) -> Migration:
    """The experiment of PipelineRL's YAML file, read without resolving anything."""
    result = Migration()
    preset = _defaults(old.get("defaults", []), result)
    given = dict(leaves({key: value for key, value in old.items() if key not in ("defaults", "hydra")}))
    if preset is not None:
        given = {**OWN_BASE, **PRESETS[preset], **given}
        _intervals_and_lengths(given, result)
        _lag(given, result)
    _interruption(given, preset is not None, result)
    mix = given.pop(DOMAIN_MIX, None)
    _environments(given, result)
    _objective(given, preset is not None, result)
    for key, value in given.items():
        _carry(key, value, result)
    _functions(result)
    if isinstance(mix, Mapping) and not _mix(mix, result):
        result.missing.append(f"{DOMAIN_MIX}: {MIX_BY_HAND}")
    if preset is not None:
        _texts_of_a_rollout(result)
    _copies(result)
    return result


def leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every dotted key with its value. A mapping that the table or the user owns stays whole."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        row = rename_of(key)
        whole = (key in _declared() and key not in OPEN) or is_free_form(key)
        if isinstance(value, Mapping) and value and not whole and (row is None or row.old != key):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


@cache
def _declared() -> frozenset[str]:
    return frozenset(key.name for key in declared(Config))


def _defaults(old: list[Any], result: Migration) -> str | None:
    """Converts the list. Returns PipelineRL's file of `finetune`, or None if the experiment derives from another."""
    preset: str | None = None
    for entry in old:
        if entry == "_self_":
            continue
        group, name = next(iter(entry.items())) if isinstance(entry, Mapping) else ("", str(entry))
        group = str(group).removeprefix("override ").lstrip("/")
        if not group:
            result.defaults.append(name.lstrip("/"))
            preset = preset or ("base" if name.lstrip("/") in ("base", "base_4gpu") else None)
        elif group == "finetune" and name in PRESETS:
            preset = name
        elif group == "rewards":
            result.defaults.append({"override rewards": REWARDS.get(name, name)})
            if name in REWARDS:
                result.changed.append(f"rewards={name} → rewards={REWARDS[name]}, the same table")
        elif group == "streams":
            result.defaults.append({"override streams": name})
        else:
            result.missing.append(f"defaults: {group}: {name}")
    if preset is not None:
        result.defaults.append({"override finetune": "pipelinerl"})
        result.changed.append(f"finetune={preset} → finetune=pipelinerl with its values written out")
    result.defaults.append("_self_")
    return preset


def _objective(given: dict[str, Any], complete: bool, result: Migration) -> None:
    """PipelineRL's ε bounds the ratio of every loss. Here `reinforce` has a separate clamp, 1 + ε."""
    loss = given.get("finetune.rl.policy_loss", "reinforce" if complete else None)
    if loss == "reinforce":
        low, high = (given.pop(f"finetune.rl.epsilon_{side}", None) for side in ("low", "high"))
        if isinstance(high, int | float):
            given["finetune.rl.ratio_clamp"] = 1 + high
            result.changed.append(f"finetune.rl.epsilon_high: {high} → finetune.rl.ratio_clamp: {1 + high}")
        if low is not None:
            result.needless.append("finetune.rl.epsilon_low: `reinforce` has no lower bound")
    elif loss and complete:
        given["finetune.rl.ratio_clamp"] = default_of("finetune.rl.ratio_clamp")  # this loss does not use it
        for side in ("low", "high"):
            given.setdefault(f"finetune.rl.epsilon_{side}", EPSILON)
    if given.get("finetune.model_class") == VALUE_HEAD:
        given.pop("finetune.rl.divide_advantage_by_std", None)
    with_kl = given.get("finetune.rl.kl_coef") or given.get("finetune.rl.final_kl_coef")
    if not with_kl and given.pop("finetune.rl.clamp_log_ratio_ref_new_value", None) is not None:
        result.needless.append("finetune.rl.clamp_log_ratio_ref_new_value: there is no KL term")


def _environments(given: dict[str, Any], result: Migration) -> None:
    """PipelineRL's server for mathematics judges answers, which the run's verifiers do here. Others stay."""
    entries = given.get("environments")
    if isinstance(entries, Mapping):
        given["environments"] = {name: entry for name, entry in entries.items() if not _judges(entry)}
    elif isinstance(entries, list):
        given["environments"] = [entry for entry in entries if not _judges(entry)]
    if _judges(given.get("environment")):
        del given["environment"]
    if given.get("environments") or given.get("environment"):
        return
    if given.pop("environments", None) is not None or entries:
        result.needless.append("environments: the run's verifiers judge mathematics")
    if given.pop("environment_key", None) is not None:
        result.needless.append("environment_key: it names none of the experiment's servers")
    for old in ENVIRONMENT_REPLICAS:
        if old in given:
            given[VERIFIERS] = given.pop(old)
            result.changed.append(f"{old}: {given[VERIFIERS]} → {VERIFIERS}: {given[VERIFIERS]}")


def _judges(entry: Any) -> bool:
    target = entry.get(TARGET) if isinstance(entry, Mapping) else None
    return isinstance(target, str) and target.startswith(MATH)


def _intervals_and_lengths(given: dict[str, Any], result: Migration) -> None:
    """Changes an interval that never ends in the run, and a server's length that the trainer's is too short for."""
    interval, steps, batch = given["eval_every_n_versions"], given.get(STEPS, MAX_TRAIN_STEPS), _batch(given)
    are_numbers = all(isinstance(number, int) and number > 0 for number in (interval, steps))
    if batch and are_numbers and interval > steps * batch:
        given["eval_every_n_versions"] = 0
        result.changed.append(f"eval_every_n_versions: {interval} → 0: the run has fewer samples")
    trained, served = (given.get(key, length) for key, length in LENGTHS.items())
    if isinstance(trained, int) and isinstance(served, int) and trained < served:
        given[MAX_MODEL_LEN] = trained
        result.changed.append(f"{MAX_MODEL_LEN}: {served} → {trained}: {SEQ_LENGTH} must hold what a server makes")


def _lag(given: dict[str, Any], result: Migration) -> None:
    """PipelineRL's actor may start the samples of a whole weight update beyond `max_lag`: U of them between updates.

    A sample is then up to max_lag + U − B samples old when it is trained, B those of an optimizer batch.
    """
    batch, interval = _batch(given), given.get(INTERVAL, 1)
    if not batch or not isinstance(interval, int) or interval <= batch:
        return
    more = (ceil(interval / batch) - 1) * batch
    for key in LAGS:
        old = given.get(key)
        if isinstance(old, int):
            given[key] = old + more
            result.changed.append(
                f"{key}: {old} → {old + more}: weights of {interval} samples ago are the newest there"
            )


def _interruption(given: dict[str, Any], complete: bool, result: Migration) -> None:
    """PipelineRL ends the run at `interrupt_train_steps`, and the learning rate's schedule at `max_train_steps`."""
    end, steps = given.get(INTERRUPTION), given.get(STEPS, MAX_TRAIN_STEPS if complete else None)
    if not isinstance(end, int) or end < 0 or not isinstance(steps, int):
        return
    del given[INTERRUPTION]
    given |= {STEPS: end, "finetune.schedule_steps": steps}
    result.changed.append(f"{INTERRUPTION}: {end} → {STEPS}: {end} and finetune.schedule_steps: {steps}")


def _batch(given: Mapping[str, Any]) -> int | None:
    sizes = [given.get(key, default) for key, default in BATCH.items()]
    return sizes[0] * sizes[1] if all(isinstance(size, int) and size > 0 for size in sizes) else None


def _mix(mix: Mapping[str, Any], result: Migration) -> bool:
    """Writes `domains` with the mix as weights. False if the data sets' names do not begin with their domain."""
    values = result.values
    played = values.get(DOMAIN_ROLLOUTS)
    names = {key: values.get(key, []) for key in NAME_LISTS}
    weights = {domain: weight for domain, weight in mix.items() if weight}
    every_name = [str(name) for listed in names.values() for name in listed]
    if values.get("actor.rollout_policy") != DISPATCHER or not isinstance(played, Mapping) or not every_name:
        return False
    if not weights.keys() <= played.keys() or not all("::" in name for name in every_name):
        return False
    params = dict(values.get(LOADER_PARAMETERS) or {})
    by_domain = params.pop("per_domain_params", None) or {}
    values["domains"] = [
        {
            "name": domain,
            "weight": weight,
            "rollout_policy": played[domain],
            "dataset_loader": values.get("dataset_loader"),
            LOADER_PARAMETERS: params
            | ({"per_domain_params": {domain: by_domain[domain]}} if domain in by_domain else {}),
            **{key: [n for n in listed if n.partition("::")[0].strip() == domain] for key, listed in names.items()},
        }
        for domain, weight in weights.items()
    ]
    for key in ("actor.rollout_policy", DOMAIN_ROLLOUTS, "dataset_loader", LOADER_PARAMETERS, *NAME_LISTS):
        values.pop(key, None)
    result.changed.append(f"{DOMAIN_MIX} → the weights of `domains`")
    return True


def _texts_of_a_rollout(result: Migration) -> None:
    """PipelineRL compares the texts of a group at the same step, and its batch and its loss count texts."""
    values = result.values
    if values.get("actor.rollout_policy") in ONE_TEXT:
        return
    values.setdefault("actor.rewards", "texts")
    if values.get(AGGREGATION, "sum_over_batch") == "sum_over_batch":
        values[AGGREGATION] = "sum_over_texts"
    values.setdefault(BATCH_UNIT, "texts")
    result.changed.append(TEXTS)


def _carry(key: str, value: Any, result: Migration) -> None:
    """One key into the new experiment, or a line about why not."""
    row = rename_of(key)
    if row is None or row.kind == "own":
        known = key in config_keys() or key in NAMES or is_free_form(key)
        if _put(key, value, result) and not known:
            result.values.setdefault(EXTRA_KEYS, []).append(key)
            if row is None:
                near = nearest_key(key)
                meant = f"; is it `{near}`?" if near else ""
                result.missing.append(f"{key}: kept for the domain, in `extra_keys`{meant}")
    elif row.kind == "moved":
        _move(key, value, row, result)
    else:
        is_off = value in (None, False, "", "none", [], -1)
        target = result.needless if row.kind == "needless" or is_off else result.missing
        target.append(f"{key}: {row.why}" if row.why else key)


def _move(key: str, value: Any, row: Rename, result: Migration) -> None:
    hashable = tuple(value) if isinstance(value, list) else value
    same = isinstance(hashable, str | int | float | bool | tuple | None) and hashable in row.values
    new = row.values[hashable] if same else value
    assert row.new
    if new == LEFT_OUT:
        result.needless.append(f"{key}: {_short(value)} is what happens here")
    elif new == NO_EQUIVALENT:
        result.missing.append(f"{key}: {_short(value)}" + (f": {row.why}" if row.why else ""))
    else:
        counted = row.unit and isinstance(new, int) and not isinstance(new, bool) and new > 0 and not same
        new = f"{new} {row.unit}" if counted else new
        _put(row.new, new, result)
        if row.new != key or new != value:
            why = f" ({row.why})" if row.why else ""
            result.changed.append(f"{key}: {_short(value)} → {row.new}: {_short(new)}{why}")


def _put(key: str, value: Any, result: Migration) -> bool:
    """Sets a value, with the new names of the keys in it. False if one of these keys does not exist here."""
    lost: list[str] = []

    def renamed(match: re.Match[str]) -> str:
        row = rename_of(match[1])
        if row is None or row.kind == "own":
            return match[0]
        if row.new is None:
            lost.append(match[1])
        return f"${{{row.new}}}"

    new = map_texts(value, lambda text: REFERENCE.sub(renamed, text))
    if lost:
        result.missing.append(f"{key}: it refers to `{lost[0]}`, which is not here")
        return False
    if key in NAME_LISTS and isinstance(new, str):
        new = [new]
    if new == f"${{{key}}}":
        return True  # both had another name there
    if new != value:
        result.changed.append(f"{key}: {_short(value)} → {_short(new)}")
    result.values[key] = new
    return True


def _functions(result: Migration) -> None:
    """Functions of PipelineRL's own domains under their names here, whose loaders take other parameters."""
    for key in ("actor.rollout_policy", "dataset_loader"):
        old = result.values.get(key)
        if not isinstance(old, str):
            continue
        result.values[key] = new = _function(key, old, result)
        if key == "dataset_loader" and new != old and result.values.pop(LOADER_PARAMETERS, None):
            result.missing.append(f"{LOADER_PARAMETERS}: this loader takes others, see its docstring")
    played = result.values.get(DOMAIN_ROLLOUTS)
    if isinstance(played, Mapping):
        result.values[DOMAIN_ROLLOUTS] = {
            name: _function(f"{DOMAIN_ROLLOUTS}.{name}", str(old), result) for name, old in played.items()
        }
        result.missing = [line for line in result.missing if not line.startswith("domain_rollouts: ")]


def _function(key: str, old: str, result: Migration) -> str:
    """A function's name here, if it does the same here."""
    if old in DOTTED_NAMES:
        result.changed.append(f"{key}: {old} → {DOTTED_NAMES[old]}")
        return DOTTED_NAMES[old]
    found = OF_A_DOMAIN.match(old)
    if found and found[1] in SAME_DOMAINS:
        try:
            resolve_function(old)
        except ConfigError:
            result.missing.append(f"{key}: {old} is not here, and no other function does the same")
    return old


def _copies(result: Migration) -> None:
    """Reports PipelineRL's domains that the experiment names and that are not here. Another task is never put there."""
    keys: dict[str, list[str]] = {}
    for key, value in result.values.items():
        for text in _texts(value):
            found = OF_A_DOMAIN.match(text)
            if found and found[1] not in SAME_DOMAINS:
                keys.setdefault(found[1], []).append(key)
    for domain, places in keys.items():
        result.missing.append(
            f"the domain `{domain}` is not here: copy PipelineRL's folder pipelinerl/domains/{domain} beside your "
            f"experiments, as a package of your own, and write that name for `pipelinerl.domains.{domain}` in "
            f"{', '.join(f'`{key}`' for key in dict.fromkeys(places))} and in its imports of itself"
        )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
