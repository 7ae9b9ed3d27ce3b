"""A GGUF file becomes a folder with the same model. The test writes files of two architectures from small models."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model.__main__ import main
from pipelinerl.tiny_model.gguf_file import convert_gguf
from pipelinerl.tiny_model.tokenizer import train_tokenizer

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"


def write_gguf(path: Path, name: str, model: torch.nn.Module, tokens: list[str], more: dict[str, object]) -> None:
    """Writes the weights of a model in float32, and a tokenizer, under llama.cpp's names."""
    config = model.config
    writer = gguf.GGUFWriter(path, name)
    writer.add_name("A small model")
    writer.add_license("apache-2.0")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(tokens)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_pad_token_id(config.pad_token_id)
    for key, value in more.items():
        getattr(writer, key)(value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for parameter, weight in model.named_parameters():
        base, _, suffix = parameter.rpartition(".")
        writer.add_tensor(f"{names.get_name(base)}.{suffix}", weight.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def qwen2_file(path: Path, **more: object) -> Qwen2ForCausalLM:
    tokenizer = train_tokenizer(["one and two"] * 20, (), 3)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokens), max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=1,
            pad_token_id=0, **SHAPE,
        )
    )  # fmt: skip
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    words = {"add_tokenizer_model": "gpt2", "add_tokenizer_pre": "qwen2", "add_chat_template": TEMPLATE}
    write_gguf(path, "qwen2", model, tokens, {**words, "add_token_merges": merges, **more})
    return model


def phi3_file(path: Path) -> Phi3ForCausalLM:
    letters = [*"\u2581abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *letters, "\u2581a", "an", "nd", "\u2581an"]
    model = Phi3ForCausalLM(
        Phi3Config(
            vocab_size=len(tokens), max_position_embeddings=128, original_max_position_embeddings=128,
            tie_word_embeddings=False, eos_token_id=2, bos_token_id=1, pad_token_id=0, **SHAPE,
        )
    )  # fmt: skip
    words = {"add_tokenizer_model": "llama", "add_token_scores": [-float(n) for n in range(len(tokens))]}
    kinds = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    words |= {"add_token_types": kinds, "add_bos_token_id": 1, "add_chat_template": TEMPLATE, "add_unk_token_id": 0}
    write_gguf(path, "phi3", model, tokens, words)
    return model


@pytest.mark.parametrize("write", [qwen2_file, phi3_file])
def test_gguf_of_an_architecture_becomes_a_folder_with_the_same_logits(write, tmp_path: Path) -> None:
    torch.manual_seed(3)
    original = write(tmp_path / "small.gguf").eval()
    assert main(["gguf", str(tmp_path / "small.gguf"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.tensor([[3, 7, 5, 11, 4, 9]])
    with torch.no_grad():
        torch.testing.assert_close(found(tokens).logits, original(tokens).logits, atol=1e-5, rtol=1e-5)
    assert type(found) is type(original)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("and and").input_ids, skip_special_tokens=True).strip() == "and and"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "and"}], tokenize=False) == "user: and"
    assert "apache-2.0" in (tmp_path / "out" / "README.md").read_text()


def test_weights_are_written_in_bfloat16_by_default(tmp_path: Path) -> None:
    original = qwen2_file(tmp_path / "small.gguf")
    folder = convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert found.dtype == torch.bfloat16
    assert torch.equal(found.model.norm.weight, original.model.norm.weight.to(torch.bfloat16))
    assert torch.equal(found.model.embed_tokens.weight, original.model.embed_tokens.weight.to(torch.bfloat16))


def drop_tensor(path: Path) -> None:
    """Renames a tensor in place, so that the file lacks it under its name."""
    data = path.read_bytes()
    assert data.count(b"blk.1.attn_q.weight") == 1
    path.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_?.weight"))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (Path.unlink, "cannot be read: No such file"),
        (lambda path: path.write_bytes(b"PK\x03\x04"), "is not a GGUF file: it begins with b'PK"),
        (cut_in_half, "is damaged or cut off"),
        (drop_tensor, "no tensor for model.layers.1.self_attn.q_proj.weight"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"qwen2", b"qwerz")), "architecture 'qwerz'"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"ggml.tokens", b"ggml.takens")), "has no tokenizer"),
        (lambda path: qwen2_file(path, add_eos_token_id=10**6), "does not read this file of architecture 'qwen2'"),
        (lambda path: qwen2_file(path, add_block_count=1), r"holds \d+ weights, of which transformers takes \d+"),
    ],
)
def test_gguf_file_that_cannot_be_read_is_refused_and_leaves_nothing(spoil, message: str, tmp_path: Path) -> None:
    qwen2_file(tmp_path / "small.gguf")
    spoil(tmp_path / "small.gguf")
    with pytest.raises(ConfigError, match=message):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "small.gguf"] == []


def test_scaled_positions_that_are_not_read_are_refused(tmp_path: Path) -> None:
    qwen2_file(tmp_path / "small.gguf", add_rope_scaling_type=gguf.RopeScalingType.YARN, add_rope_scaling_factor=4.0)
    with pytest.raises(ConfigError, match="has rope scaling 'yarn', which transformers does not read"):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "out")


def test_existing_folder_is_kept_or_refused(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    words = ["gguf", str(tmp_path / "none.gguf"), str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="exists: remove it"):
        main(words)
    (tmp_path / "out" / "config.json").write_text("{}")
    assert main([*words, "--if-missing"]) == 0


def test_missing_package_is_named_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.gguf").write_bytes(b"GGUF" + np.zeros(8, np.uint8).tobytes())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'gguf>=0.17'"):
        convert_gguf(tmp_path / "small.gguf", tmp_path / "out")
