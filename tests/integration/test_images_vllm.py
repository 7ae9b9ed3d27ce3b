"""Images through a real vLLM server: placeholders, log-probabilities, and features that follow the weights."""

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import httpx
import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from pipelinerl.async_llm import llm_async_generate
from pipelinerl.config.load import compose, parse
from pipelinerl.finetune.engines.replicated import ReplicatedEngine
from pipelinerl.finetune.export import exported_parameters
from pipelinerl.finetune.model import Policy
from pipelinerl.llm import Prompt, RolloutState, TrainableLLM
from pipelinerl.records.answers import ANSWER_PATH, AnswerRequest
from pipelinerl.rollouts import CallTokens
from pipelinerl.streams.codec import Codec
from tests.sender_kit import Senders
from tests.vision import expected_logprobs, picture, save_idefics3

TOLERANCE = 2e-5
WIDE, SQUARE = picture(56, 28), picture(40, 40, seed=1)


class Served(NamedTuple):
    server: Any
    model: Path
    engine: ReplicatedEngine


@pytest.fixture(scope="module")
def served(serving: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("images")
    model = save_idefics3(folder / "model")
    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.b"]))
    engine = ReplicatedEngine(Policy(lm.eval()), cfg, torch.device("cpu"))
    with serving.running(folder / "run", model) as server:
        yield Served(server, model, engine)


def shown(*images: bytes, text: str = "which colour?") -> dict:
    urls = ["data:image/png;base64," + base64.b64encode(image).decode() for image in images]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def llm_of(served: Served, turns: bool = False) -> TrainableLLM:
    llm = TrainableLLM(
        base_url=served.server.job.url,
        model_name="policy",
        tokenizer_name=str(served.model),
        parameters={"max_tokens": 60, "temperature": 1.0, "ignore_eos": True},
        collect_logprobs=True,
        api_token=served.server.secret,
    )
    llm.bind(RolloutState(turns=[] if turns else None))
    return llm


async def say(llm: TrainableLLM, messages: list[dict]) -> Any:
    async with aiohttp.ClientSession() as session:
        return await llm_async_generate(llm, Prompt(messages=messages), session)


def error_of(served: Served, tokens: CallTokens | None) -> float:
    assert tokens is not None
    lm = AutoModelForImageTextToText.from_pretrained(served.model, dtype=torch.float32).eval()
    lm.load_state_dict(served.engine.policy.lm.state_dict())
    ids, first = tokens.token_ids.tolist(), len(tokens.prompt_ids)
    own = expected_logprobs(lm, served.model, list(tokens.images), ids, tokens.image_spans, first)
    return (own - torch.from_numpy(tokens.logprobs)).abs().max().item()


async def test_answer_to_images_has_the_models_own_logprobs(served: Served) -> None:
    """56 × 28 pixels are two tiles and the whole image, 40 × 40 are four and the whole one: 4 tokens each."""
    llm = llm_of(served)
    tokens = (await say(llm, [shown(WIDE, SQUARE)])).call_tokens
    text = llm.tokenizer.decode(tokens.prompt_ids)
    assert text.count("<image>") == 4 * (3 + 5)
    (first, last) = [llm.tokenizer.decode(tokens.prompt_ids[start:end]) for start, end in tokens.image_spans]
    assert first.startswith("<fake_token_around_image><row_1_col_1><image>")
    assert first.count("<row_") == 2
    assert last.count("<row_") == 4
    assert error_of(served, tokens) <= TOLERANCE


async def test_later_turn_with_another_image_extends_the_tokens_of_the_first(served: Served) -> None:
    llm = llm_of(served, turns=True)
    first = await say(llm, [shown(WIDE)])
    second = await say(llm, [shown(WIDE), first.output.to_message(), shown(SQUARE, text="and here?")])
    earlier, later = first.call_tokens, second.call_tokens
    np.testing.assert_array_equal(later.token_ids[: len(earlier.token_ids)], earlier.token_ids)
    assert later.images == (WIDE, SQUARE)
    assert later.image_spans[0].tolist() == earlier.image_spans[0].tolist()
    assert error_of(served, later) <= TOLERANCE


def test_features_follow_the_weights(served: Served) -> None:
    """The same image before and after an update of all weights, those of the vision tower too."""
    senders = Senders(served.server, timeout_s=60, secret=served.server.secret)
    try:
        for version in (1, 2):
            with torch.no_grad():
                for parameter in served.engine.policy.lm.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.03)
            (outcome,) = senders.send(version, dict(exported_parameters(served.engine, torch.float32))).values()
            assert outcome.error == ""
            assert senders.sender.wait_live(version, 60)
            tokens = asyncio.run(say(llm_of(served), [shown(SQUARE)])).call_tokens
            assert tokens.version_spans[:, 2].tolist() == [version]
            assert error_of(served, tokens) <= TOLERANCE
    finally:
        senders.sender.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": (b"no image",)}, "image 0: its 8 bytes are not a PNG"),
        ({"images": (WIDE, WIDE)}, "shape (2, 2)"),
        ({"image_spans": np.array([[1, 1]], dtype=np.int32)}, "not ascending"),
        ({"image_spans": np.array([[1, 90]], dtype=np.int32)}, "not ascending"),
        ({"image_spans": np.array([[0, 1]], dtype=np.int32)}, "not those of image 0"),
        ({"images": (picture(40, 40, 2),), "token_ids": np.full(2040, 5, np.int32)}, "not those of image 0"),
    ],
)
def test_request_whose_images_cannot_be_read_says_why(served: Served, change: dict, message: str) -> None:
    placeholder = served.engine.policy.lm.config.image_token_id
    ids, spans = np.array([5, placeholder, 6], dtype=np.int32), np.array([[1, 2]], dtype=np.int32)
    request = {"token_ids": ids, "images": (WIDE,), "image_spans": spans, "format": 2}
    body = Codec(AnswerRequest).encode(AnswerRequest(**(request | change)))
    response = httpx.post(served.server.job.url + ANSWER_PATH, content=body, timeout=60)
    assert response.status_code == 400, response.text
    assert message in msgspec.json.decode(response.content)["error"]["message"]
