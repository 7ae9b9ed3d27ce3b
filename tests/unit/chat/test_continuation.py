"""Every conversation of the families' own chat templates becomes one sequence of exactly the tokens that were sampled.

The templates are those that TRL ships. What each writes between two answers is written down here by hand, and where
`renderers` has the family, its code makes the same prompts. The tokenizer is our own: single bytes, some merges, and
the family's special tokens. What is sampled is spelled in bytes, as no encoder would, so that any token that was
rendered again would show.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import llm_async_generate, make_training_text
from pipelinerl.chat.continuation import Turn, answers_of, extend, history_of
from pipelinerl.chat.reading import ReadText
from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.llm import GenerateRequest, LLMCall, Prompt, RolloutState, TrainableLLM
from pipelinerl.preprocess.samples import Shaping, sequence_advantages
from pipelinerl.records import Rollout
from pipelinerl.rollouts import BaseMetrics, CallTokens, RolloutResult, apply_rollout_reward

NO_SESSION: aiohttp.ClientSession = None  # type: ignore[assignment]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
vllm_is_imported = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, when vLLM is imported


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model family: TRL's template, special tokens, how it writes a call, and what stands between two answers."""

    template: str
    special: str
    end: str
    """Token that ends an answer."""
    user: str
    """Between an answer's end and the next answer, with the user's message at `{}`."""
    results: Callable[[list[str]], str] | None = None
    """The same with results of tools. None: the template has no tools."""
    call_end: str = ""
    """Token that ends an answer with calls, if it is another."""
    parser: str = ""
    call: Callable[[int], str] = (
        lambda a: f'<tool_call>\n{{"name": "add", "arguments": {{"b": 2,  "a": {a}}}}}\n</tool_call>'
    )
    calls_at_once: int = 2
    thought: str = "<think>\n{}\n</think>\n\n"
    kwargs: dict[str, Any] = field(default_factory=dict)
    renderer: str = ""
    """Family of `renderers` that renders instead of the template."""


def hermes_results(end: str) -> Callable[[list[str]], str]:
    def between(results: list[str]) -> str:
        told = "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results)
        return f"\n<|im_start|>user{told}<|im_end|>\n<|im_start|>assistant\n{end}"

    return between


CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
QWEN_USER = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"
GLM = "<|endoftext|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"
DEEPSEEK = (
    "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> "
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> "
    "<｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)


def glm_call(a: int) -> str:
    arguments = f"<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>"
    return f"<tool_call>add\n{arguments}\n</tool_call>"


def glm_results(end: str) -> Callable[[list[str]], str]:
    return lambda results: (
        "".join(f"\n<tool_response>\n{result}\n</tool_response>" for result in results) + "<|assistant|>" + end
    )


def deepseek_results(results: list[str]) -> str:
    told = "".join(f"<｜tool▁output▁begin｜>{result}<｜tool▁output▁end｜>" for result in results)
    return f"<｜tool▁outputs▁begin｜>{told}<｜tool▁outputs▁end｜>"


def llama_results(results: list[str]) -> str:
    told = "".join(
        f"<|start_header_id|>ipython<|end_header_id|>\n\n{json.dumps(result)}<|eot_id|>" for result in results
    )
    return told + "<|start_header_id|>assistant<|end_header_id|>\n\n"


FAMILIES = {
    "qwen2.5": Family(
        template="qwen2_5", special=CHATML, end="<|im_end|>", user=QWEN_USER, results=hermes_results(""), thought=""
    ),
    "qwen3 thinking": Family(
        template="qwen3", special=CHATML, end="<|im_end|>", user=QWEN_USER, results=hermes_results("")
    ),
    "qwen3 not thinking": Family(
        template="qwen3", special=CHATML, end="<|im_end|>", user=QWEN_USER + EMPTY, results=hermes_results(EMPTY),
        thought="", kwargs={"enable_thinking": False},
    ),
    "qwen3.5": Family(
        template="qwen3_5_think", special=CHATML + " <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|>",
        end="<|im_end|>", user=QWEN_USER + "<think>\n", results=hermes_results("<think>\n"),
        thought="{}\n</think>\n\n", parser="qwen3_xml",
        call=lambda a: f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "llama 3.1": Family(
        template="llama3_1",
        special="<|begin_of_text|> <|end_of_text|> <|eot_id|> <|eom_id|> <|start_header_id|> <|end_header_id|> "
        "<|python_tag|>",
        end="<|eot_id|>", results=llama_results, parser="llama3_json", thought="", calls_at_once=1,
        user="<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        call=lambda a: f'{{"name":"add","parameters":{{"a":{a},"b":2.0}}}}',
    ),
    "gemma 3": Family(
        template="gemma3", special="<bos> <start_of_turn> <end_of_turn>", end="<end_of_turn>", thought="",
        user="\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
    ),
    "glm": Family(
        template="glm4moe", special=GLM, end="<|user|>", call_end="<|observation|>", user="\n{}<|assistant|>",
        results=glm_results(""), parser="glm45", call=glm_call, thought="\n<think>{}</think>\n",
    ),
    "glm not thinking": Family(
        template="glm4moe", special=GLM, end="<|user|>", call_end="<|observation|>",
        user="\n{}/nothink<|assistant|>\n<think></think>", results=glm_results("\n<think></think>"), parser="glm45",
        call=glm_call, thought="", kwargs={"enable_thinking": False},
    ),
    "deepseek": Family(
        template="deepseekv3", special=DEEPSEEK, end="<｜end▁of▁sentence｜>",
        user="<｜User｜>{}<｜Assistant｜><think>\n", results=deepseek_results, parser="deepseek_v3",
        call=lambda a: "<｜tool▁calls▁begin｜>" * (a % 2 == 0)
        + f'<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{"b": 2, "a": {a}}}\n```<｜tool▁call▁end｜>'
        + "<｜tool▁calls▁end｜>" * (a % 2 == 1),
        thought="{}\n</think>\n\n",
    ),
}  # fmt: skip


def template_of(name: str) -> str:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text()


def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("e", "r"), ("i", "n"), ("u", "s"), ("us", "er"), ("Ċ", "Ċ"), ("<", "/"), ("a", "d")]
    vocabulary = {symbol: i for i, symbol in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = family.special.split()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    own = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    own += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in own])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=special[0], eos_token=family.end)
    fast.chat_template = template_of(family.template)
    return fast


class Sampler:
    """A transport that samples given texts in bytes, and keeps every prompt and every answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.next = ""
        self.end = ""
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def generate(self, llm: TrainableLLM, request: GenerateRequest, session: Any) -> CallTokens:
        ids = spelled(self.tokenizer, self.next)
        ids += [self.tokenizer.convert_tokens_to_ids(self.end)] if self.end else []
        self.prompts.append(request.token_ids.tolist())
        self.sampled.append(ids)
        return CallTokens(
            prompt_ids=request.token_ids,
            completion_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            version_spans=np.array([(0, len(ids), 0)], np.int32),
            finish_reason="stop" if self.end else "length",
        )


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text in single bytes, but for the tokens that the family adds."""
    backend = tokenizer.backend_tokenizer
    ids: list[int] = []
    for token_id in backend.encode(text, add_special_tokens=False).ids:
        piece = backend.id_to_token(token_id)
        is_added = token_id in tokenizer.added_tokens_decoder
        ids += [token_id] if is_added else [backend.token_to_id(symbol) for symbol in piece]
    return ids


def policy(family: Family) -> tuple[TrainableLLM, Sampler]:
    tokenizer = tokenizer_of(family)
    sampler = Sampler(tokenizer)
    llm = TrainableLLM(
        model_name="policy",
        tokenizer=tokenizer,
        tool_parser=family.parser,
        chat_template_kwargs=family.kwargs,
        renderer=family.renderer,
        collect_logprobs=True,
    )
    llm.bind(RolloutState(sampler, turns=[]))
    return llm, sampler


def raw(call: LLMCall, family: Family) -> dict[str, Any]:
    """The answer as ``llm_async_generate`` gives it, thoughts and all."""
    return call.output.to_message()


def as_openai_agents_keep_it(call: LLMCall, family: Family) -> dict[str, Any]:
    """Without the thought, trimmed, with null beside calls, new ids, and arguments as JavaScript writes them."""
    content = (call.output.content or "").rpartition("</think>")[2].strip()
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if call.output.tool_calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {
                "id": f"toolu_{i}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": javascript(call.function.arguments)},
            }
            for i, call in enumerate(call.output.tool_calls)
        ]
    return message


def javascript(arguments: str) -> str:
    return json.dumps(json.loads(arguments), separators=(",", ":"), sort_keys=True).replace(".0", "")


def with_reasoning_content(call: LLMCall, family: Family) -> dict[str, Any]:
    thought, closed, _ = (call.output.content or "").rpartition("</think>")
    message = as_openai_agents_keep_it(call, family)
    return message | ({"reasoning_content": thought.removeprefix("<think>").strip()} if closed else {})


KEEPERS = (raw, as_openai_agents_keep_it, with_reasoning_content)


async def converse(
    family: Family, turns: int, keep: Callable[[LLMCall, Family], dict[str, Any]]
) -> tuple[list[LLMCall], Sampler, list[str], TrainableLLM]:
    """Plays user turns, each with a round of tools where there are some. Returns what stands between the answers."""
    llm, sampler = policy(family)
    tools = [TOOL] if family.results else None
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You add."}]
    calls, between = [], []

    async def answer(text: str, end: str) -> dict[str, Any]:
        sampler.next, sampler.end = text, end
        call = await llm_async_generate(llm, Prompt(messages=[*messages], tools=tools), NO_SESSION)
        calls.append(call)
        return keep(call, family)

    for turn in range(turns):
        question = f"the user's question {turn}"
        between.append(family.user.format(question))
        messages.append({"role": "user", "content": question})
        if family.results:
            text = family.thought.format(f"use the adder {turn}")
            text += "\n".join(family.call(2 * turn + i) for i in range(family.calls_at_once))
            messages.append(await answer(text, family.call_end or family.end))
            told = [str(2 * turn + i + 2) for i in range(family.calls_at_once)]
            ids = [call["id"] for call in messages[-1]["tool_calls"]]
            assert len(ids) == family.calls_at_once
            between.append(family.results(told))
            messages += [
                {"role": "tool", "tool_call_id": id_, "content": result} for id_, result in zip(ids, told, strict=True)
            ]
        text = family.thought.format("so") + f"  it is the sum {turn}\n"
        messages.append(await answer(text, family.end))
    return calls, sampler, between[1:], llm


def trained(llm: TrainableLLM, calls: list[LLMCall]) -> Rollout:
    metrics = BaseMetrics(reward=1, success=True, no_error=True, no_answer=False)
    texts = [make_training_text(llm, call) for call in calls]
    result = RolloutResult(training_texts=texts, metrics=metrics, latency=0.0)
    return to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=len(calls), fallback_version=0, seq_length=10**6)


@vllm_is_imported
@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize("name", FAMILIES)
async def test_conversation_is_one_sequence_of_the_sampled_tokens(name: str, keep: Any) -> None:
    family = FAMILIES[name]
    calls, sampler, between, llm = await converse(family, 20, keep)
    assert llm.state.num_forks == 0
    encode = llm.tokenizer.backend_tokenizer.encode
    added = [encode(text, add_special_tokens=False).ids for text in between]
    for turns in (2, 5, 10, 20):
        count = turns * len(calls) // 20
        prompts, sampled, new = sampler.prompts[:count], sampler.sampled[:count], added[: count - 1]
        (sequence,) = trained(llm, calls[:count]).sequences
        expected = [*prompts[0], *sampled[0]]
        computed = len(prompts[0])
        for prompt, ids, tokens in zip(prompts[1:], sampled[1:], new, strict=True):
            assert prompt == expected + tokens
            computed += len(prompt) - common_prefix(prompt, expected)  # of which a server has the beginning
            expected += [*tokens, *ids]
        assert sequence.token_ids.tolist() == expected
        positions = np.concatenate([np.arange(start, end) for start, end, _ in sequence.spans])
        assert sequence.token_ids[positions].tolist() == [token for ids in sampled for token in ids]
        assert computed <= 1.05 * (len(prompts[0]) + sum(map(len, new)))


def common_prefix(one: list[int], other: list[int]) -> int:
    count = min(len(one), len(other))
    different = np.flatnonzero(np.array(one[:count]) != np.array(other[:count]))
    return int(different[0]) if len(different) else count


@vllm_is_imported
@pytest.mark.parametrize("keep", KEEPERS)
@pytest.mark.parametrize(
    ("name", "renderer"),
    [
        ("qwen3 thinking", "qwen3"),
        ("qwen3 not thinking", "qwen3"),
        ("qwen3.5", "qwen3.5"),
        ("glm", "glm-4.5"),
        ("llama 3.1", "llama-3"),
    ],
)
async def test_family_of_renderers_makes_the_prompts_of_its_template(name: str, renderer: str, keep: Any) -> None:
    """One sequence of 20 user turns, token by token that of the template: each is the other's oracle."""
    _, by_template, _, _ = await converse(FAMILIES[name], 20, keep)
    calls, by_code, _, llm = await converse(replace(FAMILIES[name], renderer=renderer), 20, keep)
    assert llm.state.num_forks == 0
    assert len(trained(llm, calls).sequences) == 1
    assert by_code.prompts == by_template.prompts


async def test_answer_that_was_cut_is_closed_as_the_template_closes_it() -> None:
    llm, sampler = policy(FAMILIES["qwen3 thinking"])
    sampler.next, sampler.end = "<think>\nfirst of a", ""
    asked = [{"role": "user", "content": "hi"}]
    await llm_async_generate(llm, Prompt(messages=asked), NO_SESSION)
    messages = [*asked, {"role": "assistant", "content": ""}, {"role": "user", "content": "go on"}]
    await llm_async_generate(llm, Prompt(messages=messages), NO_SESSION)
    closed = "<|im_end|>" + QWEN_USER.format("go on")
    encoded = llm.tokenizer.backend_tokenizer.encode(closed, add_special_tokens=False).ids
    assert sampler.prompts[1] == sampler.prompts[0] + sampler.sampled[0] + encoded


SAID = {"role": "assistant", "content": "one"}
ASKED = {"role": "user", "content": "hi"}
NEXT = {"role": "user", "content": "and?"}


@pytest.mark.parametrize(
    ("messages", "forks", "rendered"),
    [
        ([ASKED, SAID, NEXT], 0, False),
        ([ASKED, {"role": "assistant", "content": [{"type": "text", "text": " one\n"}]}, NEXT], 0, False),
        ([ASKED, {"role": "assistant", "content": "edited"}, NEXT], 1, True),
        ([ASKED, NEXT], 1, True),
        ([ASKED, SAID, NEXT, {"role": "assistant", "content": "by another"}, NEXT], 1, False),
        ([ASKED], 0, True),
        ([{"role": "user", "content": "another conversation"}, SAID, NEXT], 0, True),
        ([{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {}}]}, SAID, NEXT], 0, False),
    ],
)
async def test_prompt_that_changes_its_history_is_counted_and_right(
    messages: list[dict], forks: int, rendered: bool
) -> None:
    llm, sampler = policy(FAMILIES["qwen3 thinking"])
    sampler.next, sampler.end = "<think>\nwhy\n</think>\n\none", "<|im_end|>"
    await llm_async_generate(llm, Prompt(messages=[ASKED]), NO_SESSION)
    await llm_async_generate(llm, Prompt(messages=messages), NO_SESSION)
    assert llm.state.num_forks == forks
    begun = sampler.prompts[0] + sampler.sampled[0]
    whole = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert (sampler.prompts[1] == whole, sampler.prompts[1][: len(begun)] == begun) == (rendered, not rendered)


async def test_compacted_history_is_no_fork_and_its_sampled_summary_earns_the_rollouts_reward() -> None:
    """The harness has the model sum up, and goes on with the task and the summary alone. Later it edits an answer."""
    llm, sampler = policy(FAMILIES["qwen2.5"])
    sampler.end = "<|im_end|>"
    calls: list[LLMCall] = []

    async def say(text: str, messages: list[dict]) -> list[dict]:
        sampler.next = text
        calls.append(await llm_async_generate(llm, Prompt(messages=messages), NO_SESSION))
        return [*messages, calls[-1].output.to_message()]

    messages = await say("one", [ASKED])
    messages = await say("two", [*messages, {"role": "user", "content": "a tool's long result " * 9}])
    await say("they were one and two", [*messages, {"role": "user", "content": "Sum up."}])
    messages = await say("three", [ASKED, {"role": "user", "content": "So far: they were one and two"}])
    assert (llm.state.num_compacted, llm.state.num_forks) == (1, 0)
    messages = await say("four", [*messages, NEXT])
    assert (llm.state.num_compacted, llm.state.num_forks) == (1, 0), "the compacted conversation goes on"
    messages[2]["content"] = "edited"
    await say("five", [*messages, NEXT])
    assert (llm.state.num_compacted, llm.state.num_forks) == (1, 1)

    metrics = BaseMetrics(reward=0.25, success=True, no_error=True, no_answer=False)
    texts = apply_rollout_reward([make_training_text(llm, call) for call in calls], 0.25)
    result = RolloutResult(training_texts=texts, metrics=metrics, latency=0.0)
    rollout = to_rollout(
        result, attempt=0, latency_s=0.0, num_llm_calls=6, num_compacted=1, fallback_version=0, seq_length=10**6
    )
    assert (rollout.reward, rollout.num_compacted) == (0.25, 1)
    first, *_ = rollout.sequences
    start, end, _ = first.spans[2]
    assert first.token_ids[start:end].tolist() == sampler.sampled[2], "the summary is trained"
    better = msgspec.structs.replace(rollout, attempt=1, reward=0.75)
    worse_n, better_n = sequence_advantages([rollout, better], Shaping(seq_length=10**6))
    assert len(rollout.sequences) == 3
    assert (worse_n.tolist(), better_n.tolist()) == ([-0.5] * 3, [0.5] * 3)


@pytest.mark.parametrize(("renderer", "forks"), [("", 0), ("qwen3", 1)])
async def test_thought_that_was_ended_without_its_end_is_continued_by_the_template_alone(
    renderer: str, forks: int
) -> None:
    family = replace(FAMILIES["qwen3 thinking"], renderer=renderer)
    llm, sampler = policy(family)
    sampler.next, sampler.end = "<think>\nwhether", "<|im_end|>"
    call = await llm_async_generate(llm, Prompt(messages=[ASKED]), NO_SESSION)
    await llm_async_generate(llm, Prompt(messages=[ASKED, raw(call, family), NEXT]), NO_SESSION)
    begun = sampler.prompts[0] + sampler.sampled[0]
    assert llm.state.num_forks == forks
    assert (sampler.prompts[1][: len(begun)] == begun) == (not forks)


async def test_same_answer_in_two_conversations_continues_the_longer() -> None:
    llm, sampler = policy(FAMILIES["qwen2.5"])
    sampler.next, sampler.end = "one", "<|im_end|>"
    for messages in ([ASKED], [ASKED, SAID, NEXT], [ASKED], [ASKED, SAID, NEXT, SAID, NEXT]):
        await llm_async_generate(llm, Prompt(messages=messages), NO_SESSION)
    begun = sampler.prompts[1] + sampler.sampled[1]
    assert sampler.prompts[3][: len(begun)] == begun


@pytest.mark.parametrize(
    "name", ["cohere2", "gemma4", "lfm2", "nemotron_3_nano", "phi3", "qwen3_6", "qwen3_8", "gptoss"]
)
async def test_other_templates_of_trl_are_continued_too(name: str) -> None:
    """With one end token for all, which these templates do not write: the answer is closed as the template does."""
    family = Family(template=name, special="<bos> <end>", end="<end>", user="")
    calls, sampler, _, llm = await converse(family, 3, raw)
    assert len(trained(llm, calls).sequences) == 1
    for before, ids, prompt in zip(sampler.prompts, sampler.sampled, sampler.prompts[1:], strict=False):
        assert prompt[: len(before) + len(ids)] == before + ids
        assert "the user's question" in llm.tokenizer.decode(prompt[len(before) + len(ids) :])


PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} ASSISTANT:{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}"
)

NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system message') }}{% endif %}" + PHI
NEEDS_QUESTION = "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no question') }}{% endif %}" + PHI
ENDS_BETWEEN = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{{ '' if loop.last and m.role == 'assistant' else '\n<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CLOSES_AND_ENDS = (
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no question') }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n</{{ m.role }}><|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n{% endfor %}{{ '### assistant:\n' }}"


def unigram(scheme: str) -> Any:
    """Characters, with spaces as in SentencePiece."""
    characters = sorted(set("▁\n|:<>") | set(map(chr, range(33, 127))))
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((c, -1.0) for c in characters)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def bytes_alone(prefix: bool = False) -> Any:
    tokenizer = Tokenizer(
        models.BPE(vocab={s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "template", "options"),
    [
        (bytes_alone(), PHI, {"rstrip": True}),
        (bytes_alone(), PHI, {"lstrip": True}),
        (bytes_alone(), PHI, {"lstrip": True, "rstrip": True}),
        (bytes_alone(prefix=True), PHI, {"rstrip": True}),
        (bytes_alone(prefix=True), VICUNA, {}),
        (unigram("first"), PHI, {}),
        (unigram("first"), PHI, {"rstrip": True}),
        (unigram("first"), VICUNA, {}),
        (unigram("always"), VICUNA, {}),
        (unigram("never"), PHI, {"normalized": True}),
        (bytes_alone(), NEEDS_SYSTEM, {"rstrip": True}),
        (unigram("first"), NEEDS_QUESTION, {}),
        (bytes_alone(), ENDS_BETWEEN, {}),
    ],
)
def test_marks_that_take_white_space_away_do_so_behind_an_answer(tokenizer: Any, template: str, options: dict) -> None:
    marks = ("<|end|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True, **options) for mark in marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    renderer = ChatRenderer(fast)
    asked, told = conversation()
    prompt_ids, whole = renderer.render(asked, None, {}).token_ids, renderer.render(told, None, {}).token_ids
    end = len(prompt_ids) + whole[len(prompt_ids) :].tolist().index(fast.eos_token_id) + 1
    answer = answers_of("2", "<|end|>", ReadText("2", []), [])
    turn = Turn(history_of(asked), answer, None, prompt_ids, whole[len(prompt_ids) : end], "<|end|>")
    extended = extend(renderer, [turn], told, history_of(told), None, {})
    assert extended is not None
    assert extended[0].token_ids.tolist() == whole.tolist()


def conversation() -> tuple[list[dict], list[dict]]:
    """A prompt, and one that continues its answer "2"."""
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
    return asked, [*asked, {"role": "assistant", "content": "2"}, {"role": "user", "content": "more"}]


@pytest.mark.parametrize("tokenizer", [unigram("first"), unigram("always"), bytes_alone(), bytes_alone(prefix=True)])
def test_answer_without_an_end_is_continued_as_in_the_middle_of_a_text(tokenizer: Any) -> None:
    renderer = ChatRenderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=WORDS))
    asked, told = conversation()
    prompt_ids, whole = renderer.render(asked, None, {}).token_ids, renderer.render(told, None, {}).token_ids
    sampled = whole[len(prompt_ids) : len(prompt_ids) + 1]
    turn = Turn(history_of(asked), answers_of("2", "", ReadText("2", []), []), None, prompt_ids, sampled, "")
    extended = extend(renderer, [turn], told, history_of(told), None, {})
    assert extended is not None
    assert extended[0].token_ids.tolist() == whole.tolist()


def test_end_of_an_answer_that_the_template_may_write_twice_begins_another_sequence() -> None:
    """The template refuses an answer at the end, so that its text between the answer and the end token is unknown."""
    tokenizer = bytes_alone()
    tokenizer.add_special_tokens(["<|end|>"])
    renderer = ChatRenderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CLOSES_AND_ENDS))
    asked, told = conversation()
    answer = answers_of("2", "<|end|>", ReadText("2", []), [])
    prompt_ids, sampled = renderer.render(asked, None, {}).token_ids, renderer.encode("2\n</assistant><|end|>")
    turn = Turn(history_of(asked), answer, None, prompt_ids, sampled, "<|end|>")
    assert extend(renderer, [turn], told, history_of(told), None, {}) is None
