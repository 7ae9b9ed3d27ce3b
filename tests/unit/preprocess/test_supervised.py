"""Conversations to imitate: which step has which, how rows are read, what a step weighs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.config.load import compose, parse
from pipelinerl.errors import DomainError
from pipelinerl.finetune.data import check_record, packed, to_batch
from pipelinerl.finetune.model import Policy
from pipelinerl.finetune.rl.objective import LossSettings
from pipelinerl.preprocess.batching import OptimizerBatch
from pipelinerl.preprocess.collate import Collation, collate
from pipelinerl.preprocess.conversation_rows import Conversation
from pipelinerl.preprocess.samples import Shaping, prepare_group
from pipelinerl.preprocess.supervised import SupervisedData, open_supervised
from pipelinerl.testing import byte_tokenizer
from tests.models import make_qwen2
from tests.preprocess_kit import make_group
from tests.says import says

TOKENIZER = byte_tokenizer()
MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def conversation(answer: str) -> Conversation:
    return Conversation(messages=[MESSAGES[0], {"role": "assistant", "content": answer}])


def make_data(count: int, per_step: int, **changes: Any) -> SupervisedData:
    conversations = [conversation(chr(97 + i) * (1 + i % 3)) for i in range(count)]
    return SupervisedData(
        conversations, ChatRenderer(TOKENIZER), **{"per_step": per_step, "seed": 3, "seq_length": 64, **changes}
    )


def test_every_epoch_has_each_conversation_once_in_another_order() -> None:
    data = make_data(10, 4)
    names = [sample.group_id for step in range(5) for sample in data.samples(step)]
    first, second = names[:10], names[10:]
    assert sorted(first) == sorted(f"sft-0-{i}" for i in range(10))
    assert sorted(second) == sorted(f"sft-1-{i}" for i in range(10))
    assert [name[4:] for name in first] != [name[4:] for name in second]


def test_step_has_the_same_samples_whatever_was_asked_before() -> None:
    data = make_data(10, 4)
    for step in range(3):
        data.samples(step)
    after, alone = data.samples(3), make_data(10, 4).samples(3)
    assert [sample.sample_id for sample in after] == [sample.sample_id for sample in alone]
    for one, other in zip(after, alone, strict=True):
        assert np.array_equal(one.sequences[0][1].token_ids, other.sequences[0][1].token_ids)
        assert one.sequences[0][1].spans[:, 2].tolist() == [3]


def test_conversations_whose_answers_lie_beyond_the_limit_are_refused() -> None:
    prompt = len(ChatRenderer(TOKENIZER).render([MESSAGES[0]], None, {}).token_ids)
    with pytest.raises(DomainError, match=says("3 of 3 rows", f"`finetune.seq_length`={prompt}")):
        make_data(3, 3, seq_length=prompt, max_left_out=1.0).samples(0)
    assert len(make_data(3, 3, seq_length=prompt + 1).samples(0)) == 3


def test_step_of_rows_that_cannot_be_used_takes_the_next_one() -> None:
    long = conversation("ho")
    rows = [Conversation(messages=[{"role": "user", "content": "x" * 99}, MESSAGES[1]])] * 2 + [long] * 18
    made = SupervisedData(rows, ChatRenderer(TOKENIZER), per_step=1, seed=None, seq_length=64)
    names = [[sample.group_id for sample in made.samples(step)] for step in (0, 1, 2, 20)]
    assert names == [["sft-0-2"], ["sft-0-2"], ["sft-0-2"], ["sft-1-2"]]
    assert (made.num_used, made.num_left_out) == (18, 2), "a second epoch counts no row again"


def test_more_rows_than_allowed_that_cannot_be_used_end_the_run() -> None:
    rows = [Conversation(messages=[{"role": "user", "content": "x" * 99}, MESSAGES[1]])] * 3 + [conversation("ho")] * 17
    made = SupervisedData(rows, ChatRenderer(TOKENIZER), per_step=2, seed=None, seq_length=64)
    with pytest.raises(DomainError, match=says("3 of 3 rows", "sft.max_left_out")):
        made.samples(0)


def test_weights_of_answers_stay_with_their_tokens_behind_a_cut() -> None:
    """Answers of weights 0, 0.5 and 1; the third is cut after two tokens, and the row weighs 2."""
    said = [("a", "one"), ("b", "two"), ("c", "three")]
    messages = [
        {"role": role, "content": text} for pair in said for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    renderer = ChatRenderer(TOKENIZER)
    prompts = [len(renderer.render(messages[:n], None, {}).token_ids) for n in (1, 3, 5)]
    row = Conversation(messages=messages, weight=2.0, weights={1: 0.0, 3: 0.5})
    made = SupervisedData([row], renderer, per_step=1, seed=None, seq_length=prompts[2] + 2)
    (sample,) = made.samples(0)
    ((_, sequence),) = sample.sequences
    end = len(renderer.encode("two<|im_end|>"))
    assert sequence.spans[:, :2].tolist() == [[prompts[1], prompts[1] + end], [prompts[2], prompts[2] + 2]]
    assert sample.token_weights is not None
    assert sample.token_weights[0].tolist() == [1.0] * end + [2.0] * 2
    assert TOKENIZER.decode(sequence.token_ids[prompts[2] :].tolist()) == "th"


@pytest.mark.parametrize(("weights", "trained"), [({}, True), ({0: 0.0}, False)])
def test_prompt_weight_holds_where_no_message_of_the_prompt_has_the_weight_0(
    weights: dict[int, float], trained: bool
) -> None:
    row = Conversation(messages=MESSAGES, weights=weights)
    made = SupervisedData([row], ChatRenderer(TOKENIZER), per_step=1, seed=None, seq_length=64, prompt_weight=0.5)
    (sample,) = made.samples(0)
    assert sample.token_weights is not None
    assert (0.5 in sample.token_weights[0]) == trained


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"role": "assistant", "content": 3}, "TypeError"),
        ({"role": "assistant", "content": {"answer": "ho"}}, "TypeError"),
        ({"role": "system", "content": "late"}, "only at the beginning"),
    ],
)
def test_row_that_the_template_cannot_render_is_named(odd: dict[str, Any], told: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system messages only at the beginning') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [conversation("ho"), Conversation(messages=[*MESSAGES, odd, MESSAGES[1]], source=("d", 1))]
    data = SupervisedData(rows, ChatRenderer(tokenizer), per_step=1, seed=None, seq_length=64)
    assert len(data.samples(0)) == 1
    with pytest.raises(DomainError, match=says("row 1", "sft.datasets", told)):
        data.samples(1)


def test_conversations_are_rendered_with_the_template_that_the_rollouts_have(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ end }}{% endfor %}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    given = {
        "model_path": tmp_path,
        "output_dir": tmp_path,
        "+llm.chat_template": tmp_path / "own.jinja",
        "+llm.chat_template_kwargs": "{end: '!'}",
        "stage": "sft",
        "sft.datasets": f"[{tmp_path / 'rows.jsonl'}]",
    }
    data = open_supervised(parse(compose("base_cpu", [f"{key}={value}" for key, value in given.items()])))
    assert data is not None
    ((_, sequence),) = data.samples(0)[0].sequences
    assert TOKENIZER.decode(sequence.token_ids.tolist()) == "<user>hi!<assistant>ho!"


VOCAB = 512


@pytest.mark.parametrize("prompt_weight", [0.0, 0.25])
@pytest.mark.parametrize("loss", ["reinforce", "gspo"])
def test_mixed_batch_has_the_gradient_of_its_rollouts_and_of_the_mean_nll(loss: str, prompt_weight: float) -> None:
    """Float64; the conversations are scored one by one."""

    def make_policy() -> Policy:
        torch.manual_seed(0)
        return Policy(make_qwen2(VOCAB, initializer_range=0.2, attn_implementation="sdpa").double().train(), chunk=7)

    settings = LossSettings(policy_loss=loss, entropy_bonus=0.1)
    rollouts = tuple(prepare_group(0, make_group(np.random.default_rng(1), 0, version=0), Shaping(seq_length=64)))
    imitated = make_data(5, 5, prompt_weight=prompt_weight).samples(0)
    collation = Collation(data_parallel_size=1, seq_length=128, aggregation="token_mean", sft_weight=0.3)

    def backward(policy: Policy, samples: tuple[Any, ...]) -> None:
        (records,) = collate(OptimizerBatch(step=0, samples=samples, next_source=(1, 0)), collation)
        for record in records:
            batch = to_batch(
                record, check_record(record, VOCAB, 0), layout=packed(record.segment_lengths), float_dtype=torch.float64
            )
            policy(batch, settings).loss.backward()

    ours, oracle = make_policy(), make_policy()
    backward(ours, (*rollouts, *imitated))
    backward(oracle, rollouts)
    total = sum(float(weights.sum()) for sample in imitated for weights in sample.token_weights or ())
    for sample in imitated:
        assert sample.token_weights is not None
        ids = torch.from_numpy(sample.sequences[0][1].token_ids).long()
        logs = oracle.lm.lm_head(oracle.lm.model(input_ids=ids[None], use_cache=False)[0][0]).log_softmax(-1)
        trained = [t for start, end, _ in sample.sequences[0][1].spans.tolist() for t in range(start, end)]
        for position, weight in zip(trained, sample.token_weights[0].tolist(), strict=True):
            (-0.3 / total * weight * logs[position - 1, ids[position]]).backward(retain_graph=True)
    for (name, found), (_, wanted) in zip(ours.named_parameters(), oracle.named_parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, wanted.grad, rtol=1e-5, atol=2e-8, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_bad_rows_among_the_first_hundred_are_a_share_of_a_hundred() -> None:
    """A tenth may be left out. Of 300 rows the first 11 are bad, and the 11th is one too many."""
    bad = Conversation(messages=[{"role": "user", "content": "x" * 99}, MESSAGES[1]])

    def used(count: int) -> int:
        rows = [bad] * count + [conversation("ho")] * (300 - count)
        made = SupervisedData(rows, ChatRenderer(TOKENIZER), per_step=1, seed=None, seq_length=64, max_left_out=0.1)
        made.samples(0)
        return made.num_left_out

    assert used(10) == 10
    with pytest.raises(DomainError, match=says("sft.max_left_out")):
        used(11)
