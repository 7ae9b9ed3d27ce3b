"""Builds from a run folder what the workers need: domains, language models and limits. Starts nothing."""

import logging
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from pipelinerl.actor.executor import JudgeFunction, RolloutFunction, RolloutRules
from pipelinerl.actor.router import RequestLimits
from pipelinerl.chat import renderer_of
from pipelinerl.chat.rendering import template_options
from pipelinerl.config.load import load_run, load_run_dictconfig, to_container
from pipelinerl.config.sections import Config, LLMSection
from pipelinerl.config.servers import max_model_len, most_rollouts, sees_hint
from pipelinerl.domains.contract import cfg_of_domains, domains_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.world import WorldMap
from pipelinerl.world.process import connections_of, raise_open_files

log = logging.getLogger(__name__)

POLICY_NAME = "policy"


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """Everything that a worker needs."""

    config: Config
    cfg: DictConfig
    """The same as the domains get it, with the jobs of its world under ``jobs``."""
    functions: list[RolloutFunction]
    judges: dict[int, JudgeFunction]
    """`judge_group` of the domains that have it, by index."""
    llms: tuple[TrainableLLM, TrainableLLM]
    """For training and for evaluation."""
    rules: RolloutRules
    limits: RequestLimits


def make_llm(cfg: Config, section: LLMSection) -> TrainableLLM:
    """Makes the policy's language model for domains. Server and transport are set per rollout."""
    llm = TrainableLLM(
        model_name=POLICY_NAME,
        tokenizer_name=cfg.model_path,
        parameters=section.parameters,
        context_size=max_model_len(cfg) or TrainableLLM.model_fields["context_size"].default,
        collect_logprobs=True,
        renderer=section.renderer or "",
        tool_parser=section.tool_parser or "",
        reasoning_parser=section.reasoning_parser or "",
    )
    llm.load_tokenizer()
    llm.chat_template_kwargs = template_options(section.chat_template, section.chat_template_kwargs, llm.tokenizer)
    renderer_of(llm.tokenizer, llm.renderer).prepare(llm.chat_template_kwargs)  # refused here, not in a rollout
    return llm


def rollout_rules(cfg: Config) -> RolloutRules:
    return RolloutRules(
        timeout_s=cfg.actor.rollout_timeout_s,
        seq_length=cfg.finetune.seq_length,
        rewards=cfg.actor.rewards,
        named_rewards=tuple(cfg.finetune.rl.reward_weights),
        max_failed=cfg.actor.max_failed_rollouts_per_group,
        hinted=frozenset(i for i, domain in enumerate(domains_of(cfg)) if sees_hint(cfg, domain.section.name)),
    )


def request_limits(cfg: Config) -> RequestLimits:
    return RequestLimits(
        timeout_s=cfg.actor.request_timeout_s,
        max_retries=cfg.actor.max_request_retries,
        max_completions=most_rollouts(cfg),
        max_connections=connections_of(raise_open_files()),
    )


def load_rollout_side(run_dir: Path) -> RolloutSide:
    """Loads everything that is needed to run rollouts of this run."""
    raw = cfg_of_domains(to_container(load_run_dictconfig(run_dir)))
    raw["jobs"] = WorldMap.load(run_dir).job_dicts()
    cfg = load_run(run_dir)
    domains = domains_of(cfg)
    functions = [domain.rollout() for domain in domains]
    judges = [domain.group_judge(function) for domain, function in zip(domains, functions, strict=True)]
    llms = (make_llm(cfg, cfg.llm), make_llm(cfg, cfg.test_llm))
    return RolloutSide(
        config=cfg,
        cfg=raw,
        functions=functions,
        judges={i: judge for i, judge in enumerate(judges) if judge is not None},
        llms=llms,
        rules=rollout_rules(cfg),
        limits=request_limits(cfg),
    )
