"""From a run folder to what the actor and its workers need: domains, problems, language models. Starts nothing."""

import logging
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from pipelinerl.actor.executor import RolloutFunction, RolloutRules
from pipelinerl.actor.transport import RequestLimits
from pipelinerl.config.load import load_run, load_run_dictconfig
from pipelinerl.config.sections import Config, LLMSection
from pipelinerl.config.servers import server_options
from pipelinerl.domains.contract import domains_of
from pipelinerl.llm import TrainableLLM
from pipelinerl.process import raise_open_files
from pipelinerl.world import WorldMap

log = logging.getLogger(__name__)

DEFAULT_CONTEXT = 32000
POLICY_NAME = "policy"
RESERVED_FILES = 256
"""Open files of a worker beside its connections: logs, libraries, data sets, what a domain opens."""
MIN_CONNECTIONS = 16


@dataclass(frozen=True, kw_only=True)
class RolloutSide:
    """What a worker needs."""

    cfg: DictConfig
    """The run's configuration and, as ``jobs``, its world."""
    functions: list[RolloutFunction]
    llms: tuple[TrainableLLM, TrainableLLM]
    """For training and for evaluation."""
    rules: RolloutRules
    limits: RequestLimits


def make_llm(cfg: Config, section: LLMSection) -> TrainableLLM:
    """The policy as a domain gets it; server and transport are set per rollout."""
    llm = TrainableLLM(
        model_name=POLICY_NAME,
        tokenizer_name=cfg.model_path,
        parameters=section.parameters,
        context_size=context_size(cfg),
        collect_logprobs=True,
        chat_template_kwargs=section.chat_template_kwargs,
        tool_parser=section.tool_parser or "",
    )
    llm.load_tokenizer()
    return llm


def context_size(cfg: Config) -> int:
    return int(server_options(cfg).get("max-model-len") or DEFAULT_CONTEXT)


def rollout_rules(cfg: Config) -> RolloutRules:
    return RolloutRules(
        timeout_s=cfg.actor.rollout_timeout_s, seq_length=cfg.finetune.seq_length, rewards=cfg.actor.rewards
    )


def request_limits(cfg: Config) -> RequestLimits:
    return RequestLimits(
        timeout_s=cfg.actor.request_timeout_s,
        max_retries=cfg.actor.max_request_retries,
        max_completions=cfg.actor.llm_max_rollouts,
        max_connections=connections_of(raise_open_files()),
    )


def connections_of(open_files: int) -> int:
    """How many connections a worker with this limit on open files may have."""
    return max(MIN_CONNECTIONS, (open_files - RESERVED_FILES) // 2)  # as many may stay open between two requests


def load_rollout_side(run_dir: Path) -> RolloutSide:
    """Everything for running rollouts of this run."""
    raw = load_run_dictconfig(run_dir)
    raw["jobs"] = WorldMap.load(run_dir).job_dicts()
    cfg = load_run(run_dir)
    functions = [domain.rollout() for domain in domains_of(cfg)]
    llms = (make_llm(cfg, cfg.llm), make_llm(cfg, cfg.test_llm))
    return RolloutSide(cfg=raw, functions=functions, llms=llms, rules=rollout_rules(cfg), limits=request_limits(cfg))
