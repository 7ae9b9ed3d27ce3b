"""Rows as conversations to imitate: the forms in which data is published, and the weights that it gives."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.chat.rendering import ChatRenderer
from pipelinerl.domains.rows import UnusableRow
from pipelinerl.errors import DomainError
from pipelinerl.preprocess.conversation_rows import Conversation, load_conversations, read_conversation
from pipelinerl.preprocess.supervised import SupervisedData
from pipelinerl.testing import byte_tokenizer
from tests.says import says

ASK = {"role": "user", "content": "hi"}
SAY = {"role": "assistant", "content": "ho"}
MESSAGES = [ASK, SAY]


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", **more, "function": {"name": "f", "arguments": arguments}}


CALL = {"role": "assistant", "tool_calls": [call({"x": 1})]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"default": None}}}]
THOUGHT = {"reasoning_content": "hm", "reasoning": "hm", "thinking": "hm"}


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": MESSAGES}, MESSAGES),
        ({"messages": json.dumps(MESSAGES)}, MESSAGES),
        ({"prompt": "hi", "completion": "ho", "id": 3}, MESSAGES),
        ({"prompt": [ASK], "completion": [SAY]}, MESSAGES),
        ({"prompt": json.dumps([ASK]), "completion": json.dumps([SAY])}, MESSAGES),
        # The system prompt in a column of its own
        ({"system": "Be brief.", "messages": MESSAGES}, [{"role": "system", "content": "Be brief."}, *MESSAGES]),
        ({"system": "", "messages": MESSAGES}, MESSAGES),
        (
            {"system": "A", "messages": [{"role": "system", "content": "A"}, *MESSAGES]},
            [{"role": "system", "content": "A"}, *MESSAGES],
        ),
        ({"conversations": [{"from": "human", "value": "hi", "role": None}, {"from": "gpt", "value": "ho"}]}, MESSAGES),
        # Texts that look like lists
        ({"prompt": "hi", "completion": '[{"role": "admin"}]'}, [ASK, SAY | {"content": '[{"role": "admin"}]'}]),
        ({"prompt": "[1, 2, 3]", "completion": "[]"}, [ASK | {"content": "[1, 2, 3]"}, SAY | {"content": "[]"}]),
        (
            {"prompt": '[{"name": "f"}]', "completion": '{"role": "user"}'},
            [ASK | {"content": '[{"name": "f"}]'}, SAY | {"content": '{"role": "user"}'}],
        ),
        # Fields that parquet gives to all messages
        ({"messages": [ASK | {"tool_calls": None}, CALL | {"content": None, "weight": None}]}, [ASK, CALL]),
        ({"messages": [ASK, SAY | {"content": [{"type": "text", "text": "a", "image_url": None}]}]}, None),
        # Arguments as text and as objects, where null is a value
        ({"messages": [ASK, CALL | {"tool_calls": [call('{"x": null}')]}]}, None),
        ({"messages": [ASK, CALL | {"tool_calls": [call({"x": None, "y": [None, {"z": None}]})]}]}, None),
        ({"messages": [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": 1}}]}]}, [ASK, CALL]),
        ({"messages": [ASK, CALL | {"tool_calls": [{"type": "function", "function": {"name": "f"}}]}]}, None),
        # OpenAI's older form
        (
            {
                "messages": [
                    ASK,
                    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}},
                    {"role": "function", "name": "f", "content": "2"},
                ]
            },
            [
                ASK,
                {"role": "assistant", "tool_calls": [call('{"x": 1}', id="call00001")]},
                {"role": "tool", "name": "f", "content": "2", "tool_call_id": "call00001"},
            ],
        ),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, MESSAGES),
        ({"messages": [ASK, SAY | {"thinking": "hm"}]}, [ASK, SAY | THOUGHT]),
        ({"messages": [ASK, SAY | {"reasoning": " "}]}, [ASK, SAY | {"reasoning": " "}]),
    ],
)
def test_row_is_read(row: dict[str, Any], messages: list[dict[str, Any]] | None) -> None:
    found = read_conversation(row).messages
    if messages is None:  # as it stands there, less what is null
        messages = json.loads(json.dumps(row["messages"]).replace(', "image_url": null', ""))
        for one in (one["function"] for message in messages for one in message.get("tool_calls", [])):
            one.setdefault("arguments", {})
    assert found == messages


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"text": "hi"}, "no value in `messages`", "text"),
        ({"prompt": "hi", "completion": None}, "no value in `messages`", "completion"),
        ({"messages": "hi"}, "no list of objects", "hi"),
        ({"messages": []}, "no list of objects", "[]"),
        ({"messages": [ASK, SAY | {"content": "a \ud83d"}]}, "half a character", "'\\ud83d'"),
        ({"messages": ["hi"]}, "no list of objects", "hi"),
        ({"messages": [{"content": "x"}]}, "no role", "message 0"),
        (
            {"messages": [ASK, {"role": "Assistant", "content": "ho"}]},
            "no role that is known",
            "message 1: 'Assistant'",
        ),
        ({"messages": [ASK | {"role": "human"}, SAY]}, "no role that is known", "message 0: 'human'"),
        ({"messages": [ASK]}, "no message has the role assistant", "user"),
        ({"messages": MESSAGES, "system": "Be brief.", "images": [{"bytes": "x"}]}, "images", "`images`"),
        ({"messages": [ASK | {"content": [{"type": "image_url"}]}, SAY]}, "parts that are no text", "image_url"),
        ({"messages": [ASK, SAY | {"content": [{"type": "thinking", "thinking": "hm"}]}]}, "no text", "thinking"),
        ({"messages": [{"role": "system", "content": "A"}, *MESSAGES], "system": "B"}, "`system`", "'B'"),
        ({"messages": [ASK, {"role": "assistant", "content": None}]}, "empty or missing", "message 1"),
        ({"messages": [ASK, {"role": "assistant"}]}, "empty or missing", "message 1"),
        ({"messages": [ASK, SAY, ASK, SAY | {"content": " \n"}]}, "empty or missing", "message 3"),
        ({"messages": [ASK, SAY | {"content": float("nan")}]}, "empty or missing", "message 1"),
        ({"messages": [ASK, SAY | {"content": [{"type": "text", "text": ""}]}]}, "empty or missing", "message 1"),
        ({"messages": [ASK, SAY | {"content": "", "tool_calls": []}]}, "empty or missing", "message 1"),
        ({"messages": [ASK, SAY | {"content": 3}]}, "neither text nor a list", "3"),
        ({"messages": [{"role": "user", "content": None}, SAY]}, "no content", "message 0"),
        ({"messages": [ASK, {"role": "assistant", "function_call": {"arguments": "{}"}}]}, "no name", "message 1"),
        ({"messages": [ASK, CALL | {"tool_calls": [{"function": {"name": None}}]}]}, "no name", "message 1"),
        ({"messages": [ASK, CALL | {"function_call": {"name": "f"}}]}, "both", "message 1"),
        ({"messages": MESSAGES, "tools": "f"}, "tools", "f"),
        ({"messages": [ASK, SAY | {"train_detail": [{"begin_offset": 0}]}]}, "sounds like a weight", "train_detail"),
        ({"messages": [ASK, SAY | {"mask": 1}]}, "sounds like a weight", "mask"),
        ({"messages": [ASK, SAY | {"lossMask": 0}]}, "sounds like a weight", "lossMask"),
        ({"messages": [ASK, SAY | {"train-on-turn": False}]}, "sounds like a weight", "train-on-turn"),
        ({"messages": [ASK, SAY | {"Weight": 0}]}, "sounds like a weight", "Weight"),
        ({"messages": MESSAGES, "loss_mask": [0, 1]}, "a weight is neither", "the row"),
        ({"messages": [ASK, SAY | {"weight": -1}]}, "a weight is neither", "weight -1"),
        ({"messages": [ASK, SAY | {"weight": 1e300}]}, "a weight is neither", "1e+300"),
        ({"messages": [ASK, SAY | {"weight": 1001}]}, "a weight is neither", "weight 1001"),
        ({"messages": [ASK, SAY | {"weight": 0.0009}]}, "a weight is neither", "weight 0.0009"),
        ({"messages": [ASK, SAY | {"loss_mask": [0, 1]}]}, "a weight is neither", "loss_mask [0, 1]"),
        ({"messages": MESSAGES, "weight": "heavy"}, "a weight is neither", "the row"),
        ({"messages": [ASK | {"train": True}, SAY]}, "the assistant does not say", "message 0, role user"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "somebody unknown", "alien"),
    ],
)
def test_row_that_does_not_say_what_to_imitate_is_left_out(row: dict[str, Any], reason: str, detail: str) -> None:
    with pytest.raises(UnusableRow) as refused:
        read_conversation(row)
    assert reason in refused.value.reason
    assert detail in refused.value.detail


@pytest.mark.parametrize(
    ("given", "weight"),
    [
        ({}, 1.0),
        ({"weight": 0}, 0.0),
        ({"weight": 1}, 1.0),
        ({"weight": 0.25}, 0.25),
        ({"weight": 0.001}, 0.001),
        ({"weight": 1000}, 1000.0),
        ({"trainable": False}, 0.0),
        ({"train": True}, 1.0),
        ({"training": "false"}, 0.0),
        ({"loss": False}, 0.0),
        ({"loss_mask": 0, "weight": 1}, 0.0),
        ({"loss_mask": 1, "weight": None}, 1.0),
    ],
)
def test_message_gives_its_weight_and_the_template_does_not_see_it(given: dict[str, Any], weight: float) -> None:
    found = read_conversation({"messages": [ASK, SAY, ASK, SAY | given]})
    assert found.messages == [*MESSAGES, *MESSAGES]
    assert found.answer_weights == {1: 1.0, 3: weight}


@pytest.mark.parametrize(
    ("columns", "weight"),
    [({"weight": 0.5}, 0.5), ({"loss_weight": "2"}, 2.0), ({"trainable": False}, 0.0), ({"sample_weight": None}, 1.0)],
)
def test_row_gives_the_weight_of_all_its_answers(columns: dict[str, Any], weight: float) -> None:
    found = read_conversation({"messages": [ASK, SAY | {"weight": 0.5}], **columns})
    assert found.answer_weights == {1: 0.5 * weight}


def test_answer_that_is_not_trained_may_be_empty() -> None:
    found = read_conversation({"messages": [ASK, {"role": "assistant", "content": None, "weight": 0}, *MESSAGES]})
    assert found.answer_weights == {1: 0.0, 3: 1.0}


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])]])
def test_tools_are_read_with_their_nulls(tools: Any) -> None:
    assert read_conversation({"messages": [ASK, CALL], "tools": tools}).tools == TOOLS


@pytest.mark.parametrize("tools", [None, [], "[]", "null"])
def test_row_without_tools_has_none(tools: Any) -> None:
    assert read_conversation({"messages": MESSAGES, "tools": tools}).tools is None


def test_older_functions_become_tools() -> None:
    row = {"messages": [ASK, CALL], "functions": [TOOLS[0]["function"]]}
    assert read_conversation(row).tools == TOOLS


def write(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(folder / "rows.jsonl")]


def test_rows_are_left_out_counted_and_named_once(tmp_path: Path) -> None:
    bad = {"messages": [ASK, {"role": "assistant", "content": None}]}
    unwanted = {"messages": [ASK, SAY | {"weight": 0}], "loss_masks": [0]}
    names = write(tmp_path, [{"messages": MESSAGES}] * 18 + [bad] * 2 + [unwanted] * 5)
    found, (report,) = load_conversations(names, 0.1)
    assert found == [Conversation(messages=MESSAGES)] * 18
    assert (report.kept, report.left_out.total()) == (18, 7)
    facts = [("5 rows", "weight 0", "row 20"), ("2 rows", "row 18", "message 1"), ("loss_masks", "loss_mask", "weight")]
    for note, own in zip(report.notes(), facts, strict=True):
        assert re.search(says(names[0], *own), note)


def test_more_rows_left_out_than_allowed_are_an_error(tmp_path: Path) -> None:
    names = write(tmp_path, [{"messages": MESSAGES}] * 8 + [{"text": "x"}] * 2)
    with pytest.raises(DomainError, match=says("2 of 10 rows", "sft.max_left_out")):
        load_conversations(names, 0.1)
    assert load_conversations(names, 0.2)[1][0].left_out.total() == 2


@pytest.mark.parametrize("rows", [[], [{"messages": [ASK, SAY | {"weight": 0}]}]])
def test_data_set_with_nothing_to_imitate_is_an_error(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(DomainError, match=says("rows.jsonl")):
        load_conversations(write(tmp_path, rows), 1.0)


def test_parquet_and_jsonl_give_the_same_conversations(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    messages = [ASK, CALL, ASK, CALL | {"tool_calls": [call({"y": 2})]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [
        {"messages": messages, "tools": json.dumps(tools), "weight": None},
        {"messages": MESSAGES, "weight": 0.5},
    ]
    names = write(tmp_path, rows)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    read, _ = load_conversations(names, 0.1)
    assert read == load_conversations([str(tmp_path / "rows.parquet")], 0.1)[0]
    assert [one.weight for one in read] == [1.0, 0.5]
    assert (read[0].messages, read[0].tools) == (messages, tools), "the arguments of one call are none of the other's"


PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = PLAIN.replace(
    "{{ m.content }}", "{% if m.reasoning_content %}<{{ m.reasoning_content }}>{% endif %}{{ m.content }}"
)


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"messages": [ASK, SAY | {"reasoning": "hm"}]}, "thoughts"),
        ({"messages": [ASK, CALL]}, "tool calls"),
        ({"messages": MESSAGES, "tools": TOOLS}, "the tools"),
    ],
)
def test_what_the_template_leaves_out_is_refused(row: dict[str, Any], lost: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = PLAIN
    data = SupervisedData([read_conversation(row)], ChatRenderer(tokenizer), per_step=1, seed=None, seq_length=99)
    with pytest.raises(DomainError, match=says("the chat template leaves out", lost)):
        data.samples(0)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_are_trained_where_the_template_renders_them(key: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = THINKS
    row = read_conversation({"messages": [ASK, SAY | {key: "hm"}]})
    (sample,) = SupervisedData([row], ChatRenderer(tokenizer), per_step=1, seed=None, seq_length=99).samples(0)
    ((_, sequence),) = sample.sequences
    ((start, end, _),) = sequence.spans.tolist()
    assert tokenizer.decode(sequence.token_ids[start:end].tolist()) == "<hm>ho<|im_end|>"
