"""Whether the model's own chat template takes what a domain asks, and vLLM's parsers can be made, before the start.

`python -m pipelinerl.launcher.chat_trial < configuration as JSON` makes the parsers. It answers {"refusal": text or
null}.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.chat.families import renderer_of
from pipelinerl.chat.reading import RL_TOOL, reader_of
from pipelinerl.chat.rendering import ChatRenderer, template_options
from pipelinerl.config.load import parse_container
from pipelinerl.config.sections import Config
from pipelinerl.errors import ConfigError, DomainError
from pipelinerl.launcher.trial import answer
from pipelinerl.llm import load_tokenizer

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None
TOOL = {"type": "function", "function": {"name": "tool", "parameters": {"type": "object", "properties": {}}}}
"""A tool without which no parser of calls is made."""


def try_chat(cfg: Config, asked: Sequence[tuple[Messages, Tools]]) -> Iterator[str]:
    """Render prompts as the run will. Yields warnings.

    Nothing is tried for a model that is not on this machine, or not yet.

    Args:
        asked: messages and tools of prompts.
    Raises:
        ConfigError: the run would fail.
    """
    tokenizer = tokenizer_of(cfg.model_path)
    if tokenizer is None:
        return
    for name, section in (("llm", cfg.llm), ("test_llm", cfg.test_llm)):
        options = template_options(section.chat_template, section.chat_template_kwargs, tokenizer)
        renderer = renderer_of(tokenizer, section.renderer or "")
        of_model = f"`{name}.chat_template` is {section.chat_template!r}, `model_path` is {cfg.model_path!r}"
        if asked and not (section.renderer or options.get("chat_template") or tokenizer.chat_template):
            raise ConfigError(
                f"{of_model}: the model has no chat template: set `llm.chat_template` to the file of one, or "
                "`llm.renderer`"
            )
        refusals = [refusal_of_prompt(renderer, messages, tools, options) for messages, tools in asked]
        if refusals and all(refusals):
            raise ConfigError(f"{of_model}: the chat template refuses the domain's prompts: {refusals[0]}")
        taken = [prompt for prompt, refusal in zip(asked, refusals, strict=True) if not refusal]
        if name == "llm" and any(hides_tools(renderer, *prompt, options) for prompt in taken):
            yield (
                f"{of_model}: the chat template does not show the domain's tools to the model: describe them in a "
                "message, or set llm.chat_template to the file of one that does"
            )
        if name == "llm" and any(hides_system(renderer, *prompt, options) for prompt in taken):
            yield (
                f"{of_model}: the chat template does not show the system message to the model: say it in the question "
                "(actor.system_prompt=''), or set llm.chat_template to the file of one that does"
            )


def parsers_of(cfg: Config) -> list[tuple[str, str]]:
    """(key, name) of every parser of vLLM that the run uses. Empty also for a model that is not on this machine."""
    keys = ("llm.tool_parser", "llm.reasoning_parser", "test_llm.tool_parser", "test_llm.reasoning_parser")
    sections = (cfg.llm, cfg.test_llm)
    names = [name for section in sections for name in (section.tool_parser, section.reasoning_parser)]
    named = [(key, name) for key, name in zip(keys, names, strict=True) if name]
    chosen = [(key, name) for key, name in named if not (name == RL_TOOL and key.endswith("tool_parser"))]
    return chosen if has_tokenizer(cfg.model_path) else []


def refusal_of_parsers(cfg: Config) -> str | None:
    """Why a parser cannot be made. None: all can."""
    tokenizer = load_tokenizer(cfg.model_path)
    for key, name in parsers_of(cfg):
        parsers = (name, "") if key.endswith("tool_parser") else ("", name)
        try:
            reader_of(*parsers, tokenizer, [TOOL], cfg.llm.chat_template_kwargs)
        except DomainError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 — parsers of vLLM raise anything
            return f"`{key}` is {name!r} and cannot be used with {cfg.model_path!r}: {described(error)}"
    return None


def tokenizer_of(model_path: str) -> Any:
    """The model's tokenizer. None: it is not on this machine, or not yet.

    Raises:
        ConfigError: it cannot be loaded.
    """
    if not has_tokenizer(model_path):
        return None
    try:
        return load_tokenizer(model_path)
    except Exception as error:  # tokenizers raises anything
        raise ConfigError(f"`model_path` is {model_path!r}: its tokenizer: {described(error)}") from error


def has_tokenizer(model_path: str) -> bool:
    return (Path(model_path).expanduser() / "tokenizer.json").is_file()


def refusal_of_prompt(renderer: ChatRenderer, messages: Messages, tools: Tools, options: dict[str, Any]) -> str | None:
    """Why a template does not render a prompt, with the cure if the system message is the reason. None: it does."""
    try:
        renderer.render(messages, tools, options)
    except Exception as error:  # noqa: BLE001 — a template raises anything
        said = described(error)
    else:
        return None
    is_about_system = messages[0].get("role") == "system" and len(messages) > 1
    if is_about_system and refusal_of_prompt(renderer, messages[1:], tools, options) is None:
        return f"{said}; it takes the prompt without its system message: set actor.system_prompt=''"
    return said


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def hides_tools(renderer: ChatRenderer, messages: Messages, tools: Tools, options: dict[str, Any]) -> bool:
    """Whether a template renders a prompt with tools as one without them."""
    return bool(tools) and is_rendered_as(renderer, (messages, tools), (messages, None), options)


def hides_system(renderer: ChatRenderer, messages: Messages, tools: Tools, options: dict[str, Any]) -> bool:
    """Whether a template renders the same for another system message. Without one it may write its own."""
    if messages[0].get("role") != "system":
        return False
    other = [messages[0] | {"content": "another"}, *messages[1:]]
    return is_rendered_as(renderer, (messages, tools), (other, tools), options)


def is_rendered_as(
    renderer: ChatRenderer, prompt: tuple[Messages, Tools], other: tuple[Messages, Tools], options: dict[str, Any]
) -> bool:
    """Whether a template renders both the same. False also if it refuses ``other``."""
    if refusal_of_prompt(renderer, *other, options) is not None:
        return False
    return renderer.render(*prompt, options).text == renderer.render(*other, options).text


if __name__ == "__main__":
    answer(lambda container: {"refusal": refusal_of_parsers(parse_container(container))})
