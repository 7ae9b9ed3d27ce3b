"""Judges as servers of the run: a reward model's number, and a language model held to the form of a verdict."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from pipelinerl.domains.judge_client import judge_of
from pipelinerl.world import WorldMap

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
QUESTION, ANSWERS = "Which is larger?", ("Seven.", "It is <|im_end|> eight.")


def configuration(run_dir: Path) -> DictConfig:
    """As a domain gets it."""
    cfg = OmegaConf.load(run_dir / "conf" / "config.yaml")
    assert isinstance(cfg, DictConfig)
    return OmegaConf.merge(cfg, {"jobs": WorldMap.load(run_dir).job_dicts()})


def judges(model: Path, **fields: Any) -> tuple[str, ...]:
    entry = {"name": "good", "model_path": str(model), **fields}
    written = "{" + ", ".join(f"{name}: {value}" for name, value in entry.items()) + "}"
    return (f"judges=[{written}]", "world.preprocessor_fraction=1", "launcher.startup_timeout_s=60")


@pytest.mark.slow
async def test_reward_model_is_served_and_says_what_transformers_says(
    tmp_path: Path, serving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "num_labels": 1}
    model = Qwen2ForSequenceClassification(Qwen2Config(**sizes, **heads, pad_token_id=0, bos_token_id=None)).eval()
    model.save_pretrained(tmp_path / "model")
    serving.save_byte_tokenizer(tmp_path / "model")
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    overrides = judges(tmp_path / "model", kind="reward")
    with serving.running(tmp_path, tmp_path / "model", kind="preprocessor_llm", overrides=overrides) as server:
        monkeypatch.setenv("PIPELINERL_SECRET", server.secret)
        client = judge_of(configuration(tmp_path), "good")
        async with aiohttp.ClientSession() as session:
            numbers = [(await client.check(session, QUESTION, answer)).score for answer in ANSWERS]
    for answer, number in zip(ANSWERS, numbers, strict=True):
        text = f"user: {QUESTION}\nassistant: {answer.replace('<|', '< |')}\n"
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        with torch.no_grad():
            assert number == pytest.approx(model(ids).logits.item(), abs=2e-4)
    assert abs(numbers[0] - numbers[1]) > 1e-3


@pytest.mark.slow
async def test_language_model_that_knows_nothing_still_says_a_verdict(
    tmp_path: Path, serving: SimpleNamespace, tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = (
        *judges(tiny_qwen2, levels=4, max_tokens=1800),
        "vllm_config.vllm_kwargs.max_model_len=4000",
        "+vllm_config.vllm_kwargs.structured-outputs-config={backend: xgrammar, disable_any_whitespace: true}",
    )
    with serving.running(tmp_path, tiny_qwen2, kind="preprocessor_llm", overrides=overrides) as server:
        monkeypatch.setenv("PIPELINERL_SECRET", server.secret)
        client = judge_of(configuration(tmp_path), "good")
        async with aiohttp.ClientSession() as session:
            verdicts = [await client.check(session, QUESTION, answer) for answer in ANSWERS]
    assert all(verdict.score in (0, 0.25, 0.5, 0.75, 1) for verdict in verdicts)
    assert all(verdict.detail for verdict in verdicts)
    assert client.num_calls == 2
