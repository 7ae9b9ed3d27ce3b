"""Constraints within `finetune.rl`: what a loss takes by the registry, and no ratio counted twice."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from pipelinerl.config.keys import declared
from pipelinerl.config.objectives import ADVANTAGES, CORRECTIONS, POLICY_LOSSES, loss_signature
from pipelinerl.config.sections import Config, RLSection
from pipelinerl.config.servers import needs_reference, sends_adapter


@cache
def defaults() -> Mapping[str, Any]:
    """Default values of `finetune.rl`."""
    return {key.last: key.default for key in declared(RLSection)}


def _changed(config: Config, *names: str) -> str:
    """Returns the given keys of `finetune.rl` that differ from their defaults, with their values."""
    values = {name: getattr(config.finetune.rl, name) for name in names}
    return " and ".join(f"`finetune.rl.{name}`={value}" for name, value in values.items() if value != defaults()[name])


def objective_is_known(config: Config) -> str | None:
    for name, registry in (("policy_loss", POLICY_LOSSES), ("advantage", ADVANTAGES)):
        value, kwargs = getattr(config.finetune.rl, name), getattr(config.finetune.rl, f"{name}_kwargs")
        if value not in registry and "." not in value:
            return (
                f"`finetune.rl.{name}` is {value!r}: it is none of {', '.join(registry)}; write the dotted name of a "
                "function of yours as module.function"
            )
        if value in registry and kwargs:
            return (
                f"`finetune.rl.{name}_kwargs` is for functions of yours, but `finetune.rl.{name}` is {value}: remove it"
            )
    return None


def loss_keys_are_used(config: Config) -> str | None:
    """Refuses keys that a built-in loss does not take, by the registry. Other functions are checked by a trial."""
    loss = config.finetune.rl.policy_loss
    if loss not in POLICY_LOSSES:
        return None
    every = {key for known in POLICY_LOSSES for key in loss_signature(known).given}
    taken = loss_signature(loss).given
    changed = _changed(config, *sorted(every - set(taken)))
    if not changed:
        return None
    return (
        f"{changed} has no effect: `finetune.rl.policy_loss` is {loss}, which takes "
        f"{' and '.join(taken) or 'none of these keys'}; remove it"
    )


def dual_clip_is_beyond_the_clip(config: Config) -> str | None:
    rl = config.finetune.rl
    if rl.policy_loss not in POLICY_LOSSES or rl.dual_clip > 1 + rl.epsilon_high:
        return None
    return (
        f"`finetune.rl.dual_clip` is {rl.dual_clip:g}, but the clip ends at 1 + `finetune.rl.epsilon_high` = "
        f"{1 + rl.epsilon_high:g}: the bound for A < 0 lies beyond the clip; raise the first or lower the second"
    )


def ratio_clamp_is_not_replaced(config: Config) -> str | None:
    rl, changed = config.finetune.rl, _changed(config, "ratio_clamp")
    masked = rl.token_mis is not None or rl.sequence_mis is not None
    if rl.policy_loss != "reinforce" or not changed or not masked or rl.token_tis or rl.sequence_tis:
        return None
    return f"{changed} has no effect: a mask (token_mis, sequence_mis) takes the place of the clamp; remove one"


def lower_mask_has_an_upper_one(config: Config) -> str | None:
    rl = config.finetune.rl
    if rl.token_mis_low is None or (rl.token_mis is not None and rl.token_mis >= 1):
        return None
    return (
        f"`finetune.rl.token_mis_low` is {rl.token_mis_low:g} and `finetune.rl.token_mis` {rl.token_mis}: the mask "
        "keeps ratios between both; set the second to 1 or more (5 is usual), or the first to null"
    )


def ratio_is_counted_once(config: Config) -> str | None:
    rl = config.finetune.rl
    loss, known = rl.policy_loss, POLICY_LOSSES.get(rl.policy_loss)
    truncated = [name for name in ("token_tis", "sequence_tis") if getattr(rl, name) is not None]
    if len(truncated) == 2:
        return (
            f"`finetune.rl.token_tis`={rl.token_tis} and `finetune.rl.sequence_tis`={rl.sequence_tis}: the weight is "
            "the token's ratio or the sequence's, truncated; remove one"
        )
    if known is None or known.reads_weight or config.proximal_steps is not None or not truncated:
        return None
    given = f"`finetune.rl.{truncated[0]}`={getattr(rl, truncated[0])}"
    if known.proximal == "never":
        return f"{given} has no effect: {loss} has no weight π/μ that it could bound; remove it"
    return (
        f"{given}: {loss} already holds π/μ in its clip, so that truncating it would count it twice; use token_mis, "
        "sequence_mis or veto, or set finetune.rl.proximal_every"
    )


def objective_is_default(config: Config) -> bool:
    """Whether the policy loss is the default without corrections, and no advantage is the user's."""
    return config.finetune.rl.advantage in ADVANTAGES and not _changed(config, "policy_loss", *CORRECTIONS)


def proximal_policy_is_used(config: Config) -> str | None:
    rl = config.finetune.rl
    known = POLICY_LOSSES.get(rl.policy_loss)
    if rl.proximal_every is None or known is None or known.proximal != "never":
        return None
    return (
        f"`finetune.rl.proximal_every`={rl.proximal_every} has no effect: {rl.policy_loss} clips no ratio to a "
        "proximal policy; remove it"
    )


def kl_clamp_is_used(config: Config) -> str | None:
    rl, changed = config.finetune.rl, _changed(config, "kl_clamp")
    if rl.kl_coef == 0 and rl.final_kl_coef == 0 and changed:
        return f"{changed} has no effect: `finetune.rl.kl_coef` and `finetune.rl.final_kl_coef` are 0; remove it"
    return None


def loss_is_a_def(config: Config) -> str | None:
    """Refuses a loss whose arguments no source shows, such as a `functools.partial`."""
    loss = config.finetune.rl.policy_loss
    path = loss_signature(loss).no_def_in
    if path is None:
        return None
    return (
        f"`finetune.rl.policy_loss` is {loss}, but {path} has neither a `def` of this name nor an import or another "
        "name of one: write a `def` there that calls what you mean, with the parameters that it needs"
    )


def loss_has_its_figures(config: Config) -> str | None:
    """Refuses a loss that names figures of tokens which nothing in the run computes."""
    rl = config.finetune.rl
    named = loss_signature(rl.policy_loss).figures
    loss = f"`finetune.rl.policy_loss` {rl.policy_loss}"
    if "values" in named and rl.advantage != "value":
        return f"{loss} names `values`, but `finetune.rl.advantage` is {rl.advantage}: only `value` has a value head"
    if "teacher_logprobs" in named and not config.teachers:
        return f"{loss} names `teacher_logprobs`, but `teachers` is empty: name a model there"
    if "ref_logprobs" in named and config.world.preprocessor_fraction == 0:
        return f"{loss} names `ref_logprobs`, but `world.preprocessor_fraction` is 0: a reference server needs a device"
    return None


def teachers_teach(config: Config) -> str | None:
    """Refuses teachers that nothing reads or that have no server, and domains without exactly one teacher."""
    rl, teachers = config.finetune.rl, config.teachers
    if not teachers:
        changed = _changed(config, "teacher_coef", "teacher_top_k", "reward_coef")
        return f"{changed} has no effect: `teachers` is empty; name a model there" if changed else None
    if rl.teacher_coef == 0 and "teacher_logprobs" not in loss_signature(rl.policy_loss).figures:
        return (
            "`teachers` has no effect: `finetune.rl.teacher_coef` is 0 and the loss does not name `teacher_logprobs`; "
            "raise the first, or remove the teachers"
        )
    if rl.teacher_coef == 0 and (changed := _changed(config, "teacher_top_k", "reward_coef")):
        return f"{changed} has no effect: `finetune.rl.teacher_coef` is 0; remove it"
    if config.world.preprocessor_fraction == 0:
        return "`teachers` need servers, but `world.preprocessor_fraction` is 0: set it to 1 or more"
    if config.preprocess.filter_zero_advantage_groups and rl.teacher_coef > 0:
        return (
            "`preprocess.filter_zero_advantage_groups` drops groups whose rewards are equal, but their tokens learn "
            "from the teacher (`finetune.rl.teacher_coef`): set it false"
        )
    if not config.domains:
        known = [teacher for teacher in teachers if teacher.domains is not None]
        if known or len(teachers) > 1:
            return "`teachers` has several models or names domains, but the run has one domain: name one model for all"
        return None
    for domain in config.domains:
        own = [t.model_path or config.model_path for t in teachers if t.domains is None or domain.name in t.domains]
        if len(own) != 1:
            return f"domain {domain.name} has {len(own)} teachers ({', '.join(own) or 'none'}): give every domain one"
    names = {domain.name for domain in config.domains}
    unknown = sorted({name for teacher in teachers for name in teacher.domains or ()} - names)
    return f"`teachers` names domain {unknown[0]!r}, which is none of {', '.join(sorted(names))}" if unknown else None


def averages_follow_the_policy(config: Config) -> str | None:
    """Refuses a teacher that is an average of the policy where it would have no start, or get no whole versions."""
    for teacher in config.teachers:
        if teacher.ema is None:
            continue
        if teacher.model_path is not None:
            return (
                f"`teachers.ema` is {teacher.ema:g} and `teachers.model_path` {teacher.model_path!r}: an average of "
                "the policy begins with the policy; remove one"
            )
        needs = f"`teachers.ema` is {teacher.ema:g}, an average of whole versions that its server is sent in the run"
        if sends_adapter(config):
            return f"{needs}, but the run sends adapters: set finetune.lora.send=merged"
        if config.weights.backend == "store":
            return f"{needs}, but `weights.backend` is store: take tcp or nccl"
        if config.debug.mode is not None:
            return f"{needs}, but `debug.mode` is {config.debug.mode}, which has no trainer or no servers: name a model"
    return None


def reference_model_is_used(config: Config) -> str | None:
    if config.reference_model_path is None or needs_reference(config):
        return None
    return (
        f"`reference_model_path` is {config.reference_model_path!r}, but the loss reads no reference: set "
        "finetune.rl.kl_coef, or remove it"
    )


def kl_has_reference(config: Config) -> str | None:
    rl = config.finetune.rl
    if (rl.kl_coef == 0 and rl.final_kl_coef == 0) or config.world.preprocessor_fraction > 0:
        return None
    return (
        f"`finetune.rl.kl_coef` is {rl.kl_coef} and `finetune.rl.final_kl_coef` is {rl.final_kl_coef} but "
        "`world.preprocessor_fraction` is 0: a KL term needs a reference server; set it to 1 or "
        "more, or both coefficients to 0"
    )


def value_advantage_has_value_loss(config: Config) -> str | None:
    rl = config.finetune.rl
    if rl.advantage == "value" and rl.value_loss_coef == 0 and "values" not in loss_signature(rl.policy_loss).figures:
        return (
            "`finetune.rl.advantage` is value but `finetune.rl.value_loss_coef` is 0: the value head would "
            "never learn; set it to 0.5"
        )
    if rl.advantage != "value" and rl.value_loss_coef > 0:
        return (
            f"`finetune.rl.value_loss_coef` is {rl.value_loss_coef} but `finetune.rl.advantage` is "
            f"{rl.advantage}: only the "
            "value advantage has a value head; set the first to 0 or the second to value"
        )
    return None


def group_has_baseline(config: Config) -> str | None:
    if config.attempts > 1 or config.finetune.rl.advantage == "value" or config.finetune.rl.teacher_coef > 0:
        return None
    return (
        f"`attempts` is 1 but `finetune.rl.advantage` is {config.finetune.rl.advantage}: a group of "
        "one has advantage 0 and "
        "nothing would be learned; raise `attempts` or use the value advantage"
    )


def named_rewards_are_compared(config: Config) -> str | None:
    """Refuses named rewards beside what acts on the one reward of a rollout."""
    rl = config.finetune.rl
    if not rl.reward_weights:
        return None
    conflicts = {
        "`finetune.rl.advantage` is value, whose value head learns the one reward": rl.advantage == "value",
        f"`actor.rewards` is {config.actor.rewards}, so that every text has its own": config.actor.rewards != "rollout",
        "`preprocess.overlong_buffer_tokens` penalises the one reward": config.preprocess.overlong_buffer_tokens > 0,
    }
    found = next((text for text, is_so in conflicts.items() if is_so), None)
    return f"`finetune.rl.reward_weights` names rewards of a rollout, but {found}: remove one" if found else None


def clip_is_idle(config: Config) -> str | None:
    if config.proximal_steps != 1 or not _changed(config, "epsilon_low", "epsilon_high"):
        return None
    return (
        "finetune.rl.epsilon_low and epsilon_high clip nothing: the proximal policy changes with every optimizer step, "
        "so that its ratio is 1; finetune.rl.proximal_every=4 shares one over four steps"
    )


def block_of_steps_can_be_there(config: Config) -> str | None:
    """All data of the steps that share a proximal policy are there before the first of them is trained."""
    every, bound = config.proximal_steps or 1, config.max_lag_steps
    if config.schedule == "conventional" and config.steps_per_phase % every:
        return (
            f"`finetune.rl.proximal_every` is {every} but `steps_per_phase` is {config.steps_per_phase}: the data of a "
            "phase are generated before it; let the first divide the second"
        )
    ahead = every - 1 + config.finetune.weight_update_interval - 1
    if config.schedule == "pipeline" and bound is not None and every > 1 and bound < ahead:
        return (
            f"`finetune.rl.proximal_every` is {every} but `max_lag_steps` is {bound}: the data of {every} steps are "
            f"generated before the first of them is trained; raise the second to {ahead} or more, or lower the first"
        )
    return None


RULES = (
    objective_is_known,
    loss_keys_are_used,
    dual_clip_is_beyond_the_clip,
    ratio_clamp_is_not_replaced,
    lower_mask_has_an_upper_one,
    ratio_is_counted_once,
    proximal_policy_is_used,
    block_of_steps_can_be_there,
    kl_clamp_is_used,
    kl_has_reference,
    loss_is_a_def,
    loss_has_its_figures,
    teachers_teach,
    averages_follow_the_policy,
    reference_model_is_used,
    value_advantage_has_value_loss,
    group_has_baseline,
    named_rewards_are_compared,
)
HINTS = (clip_is_idle,)
