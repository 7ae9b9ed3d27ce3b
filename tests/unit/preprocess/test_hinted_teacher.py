"""A teacher that sees the problem's hint scores the policy's own tokens behind another prompt."""

from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.actor.sequences import to_rollout
from pipelinerl.async_llm import llm_async_generate, make_training_text, with_hint
from pipelinerl.config.servers import ScoringModel
from pipelinerl.errors import DomainError, RecordError
from pipelinerl.llm import Prompt
from pipelinerl.preprocess import reference
from pipelinerl.preprocess.reference import ReferenceScorer, Scores, as_hinted
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.records import Rollout, TrainingSequence
from pipelinerl.rollouts import BaseMetrics, RolloutResult
from pipelinerl.testing import FakeLLM, byte_tokenizer
from pipelinerl.world import Job
from tests.models import make_qwen2
from tests.preprocess_kit import make_group
from tests.says import says

HINT = "The sum is 42."
TOKENIZER = byte_tokenizer()
QUESTION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "17 + 25?"}]
AGAIN = {"role": "user", "content": "Sure?"}
HINTED = [QUESTION[0], {"role": "user", "content": f"17 + 25?\n\n{HINT}"}]


def rendered(messages: list[dict], *, ask: bool) -> list[int]:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    return TOKENIZER.encode(text, add_special_tokens=False)


async def play(answers: list[str], *, mode: str = "rollout", edit: Callable[[Any], None] | None = None) -> Rollout:
    """A conversation in which the user asks again after each answer."""
    llm = FakeLLM.saying(answers, tokenizer=TOKENIZER)
    llm.state.hint = HINT
    messages, texts = list(QUESTION), []
    async with aiohttp.ClientSession() as session:
        for _ in answers:
            call = await llm_async_generate(llm, Prompt(messages=messages), session)
            texts.append(make_training_text(llm, call))
            texts[-1].reward = 1.0
            messages = [*messages, call.output.to_message(), AGAIN]
    if edit is not None:
        edit(texts[0])
    metrics = BaseMetrics(reward=1.0, success=True, no_error=True, no_answer=False)
    result = RolloutResult(training_texts=texts, metrics=metrics, latency=0.0, rewards=mode)
    return to_rollout(result, attempt=0, latency_s=0.0, num_llm_calls=len(answers), fallback_version=0, seq_length=999)


def trained(sequence: TrainingSequence) -> list[int]:
    return [token for start, end, _ in sequence.spans.tolist() for token in sequence.token_ids[start:end].tolist()]


async def test_conversation_is_read_behind_the_hint_with_the_same_trained_tokens() -> None:
    (sequence,) = (await play(["It is 42.", "Yes."])).sequences
    spoken = [{"role": "assistant", "content": "It is 42."}, AGAIN, {"role": "assistant", "content": "Yes."}]
    whole = rendered([*HINTED, *spoken], ask=False)
    seen = as_hinted(sequence)
    assert seen.token_ids.tolist() == whole[: len(seen.token_ids)]
    assert TOKENIZER.decode(whole[len(seen.token_ids) :]) == "\n", "what the template writes behind the last token"
    assert trained(seen) == trained(sequence)
    assert TOKENIZER.decode(trained(seen)) == "It is 42.<|im_end|>Yes.<|im_end|>"
    assert HINT not in TOKENIZER.decode(sequence.token_ids)


async def test_texts_with_rewards_of_their_own_each_stand_behind_the_hint() -> None:
    first, second = (await play(["It is 42.", "Yes."], mode="steps")).sequences
    assert first.hinted_prompt.tolist() == rendered(HINTED, ask=True)
    between = [{"role": "assistant", "content": "It is 42."}, AGAIN]
    assert second.hinted_prompt.tolist() == rendered([*HINTED, *between], ask=True)
    assert TOKENIZER.decode(trained(as_hinted(second))) == "Yes.<|im_end|>"


async def test_masked_first_tokens_stay_before_the_trained_ones() -> None:
    def mask(text: Any) -> None:
        text.labels = [-100 if i < text.prompt_tokens + 3 else label for i, label in enumerate(text.labels)]

    (sequence,) = (await play(["It is 42."], edit=mask)).sequences
    assert TOKENIZER.decode(trained(sequence)) == "is 42.<|im_end|>"
    seen = as_hinted(sequence)
    assert seen.token_ids.tolist() == [*rendered(HINTED, ask=True), *TOKENIZER.encode("It is 42.<|im_end|>")]
    assert trained(seen) == trained(sequence)


async def test_scores_are_the_models_own_of_prompt_hint_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle reads prompt, hint and answer as one text. Tolerance: float32 of the same model, other lengths."""
    model = make_qwen2(len(TOKENIZER), initializer_range=0.3).eval()

    def logprobs(token_ids: list[int]) -> np.ndarray:
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            found = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return np.concatenate(([0.0], found.numpy())).astype(np.float32)

    async def score(session: Any, url: str, sequences: list[np.ndarray], **_: Any) -> list[Scores]:
        return [Scores(logprobs(sequence.tolist())) for sequence in sequences]

    monkeypatch.setattr(reference, "score_sequences", score)
    played = [await play(answers) for answers in (["It is 42."], ["It is 41.", "No: 42."])]
    own = tuple(msgspec.structs.replace(sequence, hinted_prompt=None) for sequence in played[0].sequences)
    played.append(msgspec.structs.replace(played[0], sequences=own))  # its domain built the text itself
    rollouts = tuple(msgspec.structs.replace(rollout, attempt=i) for i, rollout in enumerate(played))
    group = msgspec.structs.replace(
        make_group(np.random.default_rng(0), 0, version=0), rollouts=rollouts, attempts=len(rollouts)
    )
    samples = prepare_group(0, group, Shaping(seq_length=999))
    server = Job(name="preprocessor_llm_0", kind="preprocessor_llm", url="http://there")
    teacher = ScoringModel(path="self", column="teacher_logprobs", hint=True)
    scorer = ReferenceScorer(lambda: [server], concurrency=4, deadline_s=5, model=teacher)
    try:
        first, second, without = scorer.submit(samples).result()
    finally:
        scorer.close()

    assert without.drop_reason == "no_hint"

    def of_answers(messages: list[dict], answers: tuple[str, ...]) -> np.ndarray:
        ids = rendered(messages, ask=False)
        oracle, text = logprobs(ids), TOKENIZER.decode(ids)
        starts = [
            len(TOKENIZER.encode(text[: text.index(f"assistant\n{answer}") + len("assistant\n")])) for answer in answers
        ]
        ends = [start + len(answer) + 1 for start, answer in zip(starts, answers, strict=True)]
        return np.concatenate([oracle[start:end] for start, end in zip(starts, ends, strict=True)])

    one = [{"role": "assistant", "content": "It is 42."}]
    two = [{"role": "assistant", "content": "It is 41."}, AGAIN, {"role": "assistant", "content": "No: 42."}]
    for sample, spoken, answers in ((first, one, ("It is 42.",)), (second, two, ("It is 41.", "No: 42."))):
        assert sample.drop_reason is None
        expected = of_answers([*HINTED, *spoken], answers)
        np.testing.assert_allclose(sample.teacher_logprobs[0], expected, atol=2e-5)
        assert np.abs(expected - of_answers([*QUESTION, *spoken], answers)).max() > 0.01, "the hint is read"


def test_sequence_without_a_hinted_prompt_is_refused() -> None:
    (rollout, *_) = make_group(np.random.default_rng(0), 0, version=0).rollouts
    with pytest.raises(RecordError, match=says("hinted_prompt")):
        as_hinted(rollout.sequences[0])


async def test_edited_tokens_and_prompts_of_tokens_have_no_place_for_a_hint() -> None:
    def edit(text: Any) -> None:
        text.input_ids = [5, *text.input_ids[1:]]

    with pytest.raises(RecordError, match=says("training_texts[0]", "teachers.hint")):
        await play(["It is 42."], edit=edit)
    llm = FakeLLM.saying(["x"], tokenizer=TOKENIZER)
    llm.state.hint = HINT
    async with aiohttp.ClientSession() as session:
        with pytest.raises(DomainError, match=says("teachers.hint", "text messages")):
            await llm_async_generate(llm, Prompt(token_ids=[1, 2]), session)


def test_hint_stands_behind_the_users_last_message() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": "A"}]
    assert with_hint(parts, "H")[0]["content"] == [{"type": "text", "text": "Q"}, {"type": "text", "text": "H"}]
    assert [message["content"] for message in with_hint([*QUESTION, AGAIN], "H")] == ["Add.", "17 + 25?", "Sure?\n\nH"]
    with pytest.raises(DomainError, match=says("no user's message")):
        with_hint([{"role": "system", "content": "Add."}], "H")
