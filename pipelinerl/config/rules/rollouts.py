"""Rules about sampling, the actor and the preprocessor."""

from collections.abc import Mapping
from typing import Any

from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len

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


def max_tokens_given(config: Config) -> str | None:
    for name, section in (("llm", config.llm), ("test_llm", config.test_llm)):
        tokens = section.parameters.get("max_tokens")
        if not isinstance(tokens, int) or tokens < 1:
            return f"`{name}.parameters.max_tokens` is {tokens!r}: it must be a whole number of at least 1"
    return None


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


def sampler_takes_its_arguments(config: Config) -> str | None:
    if config.actor.sampler is None and config.actor.sampler_kwargs:
        return (
            f"`actor.sampler_kwargs` is {config.actor.sampler_kwargs} but `actor.sampler` is null: name the function "
            "that takes them, or remove them"
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


def filter_knows_advantages(config: Config) -> str | None:
    if config.preprocess.filter_zero_advantage_groups and config.finetune.rl.advantage == "value":
        return (
            "`preprocess.filter_zero_advantage_groups` has no effect: `finetune.rl.advantage` is value, which only the "
            "trainer knows; set the first to false"
        )
    return None


RULES = (
    renderer_is_alone,
    max_tokens_given,
    completion_fits_server,
    sampling_is_undistorted,
    overlong_buffer_fits,
    filter_knows_advantages,
    sampler_takes_its_arguments,
)
