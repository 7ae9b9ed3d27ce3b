"""Sections of what makes the data: sampling, the actor, evaluation, the preprocessor."""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from pipelinerl.config.keys import Section, key
from pipelinerl.records import RewardMode


class LLMSection(Section):
    """Sampling of training rollouts."""

    parameters: dict[str, Any] = key(
        {"max_tokens": 8192, "temperature": 1.0},
        "sampling of training rollouts, named as in OpenAI's API. A parameter that distorts the sampled distribution "
        "(top-p, penalties, a minimum length, …) is refused",
    )
    chat_template_kwargs: dict[str, Any] = key(
        {}, "arguments of the model's chat template, e.g. `{enable_thinking: false}`"
    )
    chat_template: str | None = key(
        None,
        "chat template instead of the tokenizer's own: a file, or the name of one of the tokenizer's templates",
    )
    renderer: str | None = key(
        None,
        "family of the package `renderers` whose code renders prompts instead of a chat template, e.g. `deepseek-v4`; "
        "`chat_template_kwargs` are its options. Needs `pip install 'pipelinerl[renderers]'`",
    )
    tool_parser: str | None = key(
        None,
        "format of the model's tool calls. Null = Hermes (Qwen), `rl_tool` = PipelineRL's, else the name of one of "
        "vLLM's parsers (`--tool-call-parser`), e.g. `llama3_json`",
    )
    reasoning_parser: str | None = key(
        None,
        "format of the model's thoughts, which agents then get apart from the answer. Null = they stay in its text, "
        "else the name of one of vLLM's parsers (`--reasoning-parser`), e.g. `qwen3`",
    )

    @property
    def temperature(self) -> float:
        """Of sampling, at which the trainer's logits are divided, too."""
        return float(self.parameters.get("temperature", 1.0))


class EvaluationLLMSection(LLMSection):
    """Sampling of evaluation rollouts."""

    parameters: dict[str, Any] = key(
        {"max_tokens": 8192, "temperature": 1.0},
        "sampling of evaluation rollouts. Every parameter is allowed",
        may_change=True,
    )
    chat_template_kwargs: dict[str, Any] = key({}, "arguments of the model's chat template", may_change=True)
    chat_template: str | None = key("${llm.chat_template}", "chat template", may_change=True)
    renderer: str | None = key("${llm.renderer}", "family whose code renders prompts", may_change=True)
    tool_parser: str | None = key("${llm.tool_parser}", "format of the model's tool calls", may_change=True)
    reasoning_parser: str | None = key("${llm.reasoning_parser}", "format of the model's thoughts", may_change=True)


class ActorSection(Section):
    """Rollouts: the domain's function, how many at a time, and what happens to those that fail."""

    rollout_policy: str = key(
        "pipelinerl.domains.math.generate_rollout",
        "the domain's `async generate_rollout(cfg, llm, problem, session)`, as a dotted name",
    )
    system_prompt: str | None = key(
        None,
        "system message of the domains that ask one question. These are math, coding, counting, countdown and "
        "instructions. Null = the domain's own, an empty text = none",
    )
    task_template: str = key("{task}", "what these domains ask. They need `{task}`, the problem's question")
    discount_factor: float = key(1.0, "factor on their reward per sampled token", gt=0, le=1)
    rewards: RewardMode = key(
        "rollout",
        "what the rewards of a rollout's texts are, where its `RolloutResult` does not say. One for all, or each its "
        "own, compared at the same step, or increments of a return. See [§1](algorithms.md)",
    )
    domain_rollouts: dict[str, str] = key(
        {},
        "rollout functions by the `domain` of a problem, for "
        "`rollout_policy: pipelinerl.domains.dispatcher.generate_multidomain_rollout`. `domains` instead mixes by "
        "weight",
    )
    sampler: str | None = key(
        None,
        "dotted name of a function of yours that weighs the training problems by how the policy does on them "
        "([curricula](guides/curricula.md)). Null = a seeded permutation of all problems per epoch",
    )
    sampler_kwargs: dict[str, Any] = key({}, "keyword arguments of the sampler")
    llm_max_rollouts: PositiveInt | Literal["auto"] = key(
        "auto",
        "rollouts at a time per inference server. Auto = each server says how many it takes: at first as many of the "
        "longest as its planned KV cache holds, then by its cache and its queue. `python -m pipelinerl.plan` "
        "recommends a fixed number",
        may_change=True,
    )
    rollout_workers: PositiveInt = key(
        1, "asyncio processes that run rollouts. More help when the domain computes", may_change=True
    )
    rollout_timeout_s: PositiveFloat = key(
        900, "a rollout that takes longer counts as failed; the answer that then grows is awaited", may_change=True
    )
    request_timeout_s: PositiveFloat = key(
        1800, "seconds without a new token after which a request counts as failed", may_change=True
    )
    max_request_retries: NonNegativeInt = key(
        8,
        "repetitions of a request after a transport error. They back off, and use another server where there is one",
        may_change=True,
    )
    max_failed_rollouts_per_group: NonNegativeInt = key(
        0, "members that a group may lose to failures and still be trained", may_change=True
    )
    max_group_reissues: NonNegativeInt = key(
        2, "times that a problem with too many failures is tried again before it is dropped", may_change=True
    )
    answer_journal: bool = key(
        True,
        "keep the answers of rollouts under way in the run folder: after a crash a rollout is played again and gets "
        "its answers so far without sampling them again. Not with `finetune.router_replay`, whose experts of every "
        "earlier turn each answer repeats. See [A crash](guides/agent.md#a-crash)",
        may_change=True,
    )
    max_domain_errors: NonNegativeInt = key(
        100,
        "exceptions of the domain's own code and rollouts that it returns without a trained token, until the run stops",
        may_change=True,
    )
    log_every_s: PositiveFloat = key(10, "interval of the actor's metrics", may_change=True)


class EvalSection(Section):
    """Evaluation on the test problems."""

    at_start: bool = key(
        True, "evaluate the weights that the run begins with. `eval.at_end` is about the last ones", may_change=True
    )
    at_end: bool = key(True, "evaluate the last weights", may_change=True)
    attempts: PositiveInt = key(1, "rollouts per test problem", may_change=True)
    timeout_s: PositiveFloat = key(3600, "longest time that new weights wait for a running evaluation", may_change=True)
    max_problems: PositiveInt | None = key(
        None, "use only the first so many test problems. Null = all", may_change=True
    )


class PreprocessSection(Section):
    """Filters, reference log-probabilities and packing."""

    filter_zero_advantage_groups: bool = key(
        "${finetune.rl.filter_zero_advantage_groups}",
        "leave out groups whose rollouts all got the same reward. See [§5](algorithms.md)",
    )
    overlong_filtering: bool = key(False, "weight 0 for rollouts that the server cut for their length")
    overlong_buffer_tokens: NonNegativeInt = key(0, "length of the soft penalty before `max_tokens`. 0 = none")
    lag_drop: Literal["never", "rollout", "token"] = key(
        "never",
        "what becomes of a token older than `max_lag_steps`. `never`: it is trained, so that lengths are trained as "
        "they were sampled. `rollout`: its rollout is dropped. `token`: it is masked "
        "([pacing](pacing.md#lag-and-length))",
    )
    reference_concurrency: PositiveInt = key(64, "requests at a time per reference server", may_change=True)
    max_ready_steps: PositiveInt = key(
        2,
        "optimizer batches packed ahead of the trainer. With `schedule=conventional` at least a phase",
        may_change=True,
    )
