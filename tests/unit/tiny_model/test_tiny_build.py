import hashlib
import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from pipelinerl.errors import ConfigError
from pipelinerl.tiny_model import build, builder
from pipelinerl.tiny_model.__main__ import main
from pipelinerl.tiny_model.builder import SETTINGS, TEMPLATE, WEIGHTS, discard_broken, publish_model, recipe_digest
from pipelinerl.tiny_model.recipes import Recipe, make_recipe, reply, user
from pipelinerl.tiny_model.warmup import PROMPT_WEIGHT, warm_up_model

QUICK = {"steps": 3}


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("tiny") / "model", "largest", 0, QUICK)


def test_same_seed_gives_the_same_bytes_and_another_seed_others(model, tmp_path):
    again = digest(build(tmp_path / "again", "largest", 0, QUICK))
    assert again == digest(model)
    assert digest(build(tmp_path / "other", "largest", 1, QUICK))["model.safetensors"] != again["model.safetensors"]


def test_model_has_a_tenth_of_a_million_parameters_and_tied_head(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert 90_000 < sum(parameter.numel() for parameter in loaded.parameters()) < 130_000
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.generation_config.eos_token_id == AutoTokenizer.from_pretrained(model).eos_token_id


@pytest.mark.parametrize("loader", [AutoTokenizer, PreTrainedTokenizerFast])
def test_numbers_and_tags_are_one_token_however_the_tokenizer_is_loaded(model, loader):
    tokenizer = loader.from_pretrained(model)
    text = " of 18, 5 and 30?<answer>30</answer>"
    tokens = [tokenizer.decode([token]) for token in tokenizer.encode(text, add_special_tokens=False)]
    assert tokens == [" of", " ", "18", ",", " ", "5", " and", " ", "30", "?", "<answer>", "30", "</answer>"]


def test_any_text_survives_encoding(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    for text in ("日本 ünïcode 12345", "a\n\n b\t", "<answer>-7</answer><|im_end|>", "def f(x): return x**2"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_answer_tags_stay_in_the_text_when_special_tokens_are_skipped(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode("<answer>7</answer><|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<answer>7</answer>"


def test_chat_template_appends_turns_without_rewriting_earlier_ones(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "a"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    longer = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert longer.startswith(prompt + "b<|im_end|>\n")


def test_warm_up_trains_what_the_assistant_says_and_the_end_of_its_turn(model):
    """Its loss is the weighted mean over each conversation by itself, in the order in which the recipe draws them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    drawn = iter([[user("1 or 2?"), reply(1)], [user("a"), reply(2), user("and then another?"), reply(3)]])
    recipe = Recipe(tags=(), max_number=3, conversation=lambda rng: next(drawn), steps=1, batch_size=2)
    total = weight = 0.0
    for prompt, answers in (("1 or 2?", [1]), ("a", [2, 3])):
        asked = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        again = "\n<|im_start|>user\nand then another?<|im_end|>\n<|im_start|>assistant\n"
        texts = [text for n in answers for text in (asked if n < 3 else again, f"<answer>{n}</answer><|im_end|>")]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        weights = [1.0 if index % 2 else PROMPT_WEIGHT for index, part in enumerate(ids) for _ in part][1:]
        ids_T = torch.tensor([token for part in ids for token in part])
        with torch.no_grad():
            logprobs_TV = lm(input_ids=ids_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        chosen_T = logprobs_TV.gather(1, ids_T[1:, None])[:, 0]
        total -= (torch.tensor(weights) * chosen_T).sum().item()
        weight += sum(weights)
    assert warm_up_model(lm, tokenizer, recipe, Random(0)) == pytest.approx(total / weight, rel=1e-5)


def test_existing_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="exists"):
        build(tmp_path, "largest", 0, QUICK)
    assert (tmp_path / "mine").read_text() == "keep"


def test_model_of_another_node_is_kept_where_that_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"of": "them"}')
    assert build(tmp_path, "largest", 0, QUICK, if_missing=True) == tmp_path
    assert (tmp_path / "config.json").read_text() == '{"of": "them"}'
    (tmp_path / "config.json").rename(tmp_path / "notes.txt")
    with pytest.raises(ConfigError, match="exists"):
        build(tmp_path, "largest", 0, QUICK, if_missing=True)


def test_builder_that_lost_the_race_keeps_the_published_folder(tmp_path):
    target, scratch = tmp_path / "model", tmp_path / ".model.x"
    for folder, text in ((target, "first"), (scratch, "second")):
        folder.mkdir()
        (folder / "config.json").write_text(text)
    publish_model(scratch, target)
    assert (target / "config.json").read_text() == "first"


def test_failed_build_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.tiny_model.builder.write_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        build(tmp_path / "model", "largest", 0, QUICK)
    assert list(tmp_path.iterdir()) == []


def test_command_builds_and_refuses(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "cache"))
    out = str(tmp_path / "model")
    assert main(["--out", out, "--recipe", "guessing", "--param", "steps=2", "--param", "max_number=16"]) == 0
    assert (Path(out) / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="exists"):
        main(["--out", out, "--recipe", "guessing"])


def test_cached_model_is_copied_and_equal(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    built = build(tmp_path / "first", "largest", 0, QUICK, cache)
    monkeypatch.setattr("pipelinerl.tiny_model.builder.write_model", lambda *_: pytest.fail("built again"))
    assert digest(build(tmp_path / "second", "largest", 0, QUICK, cache)) == digest(built)
    assert len(list(cache.iterdir())) == 1


def test_cache_tells_recipes_apart_by_what_they_show(tmp_path, monkeypatch):
    base = recipe_digest(make_recipe("largest", QUICK), 0)
    assert recipe_digest(make_recipe("largest", dict(QUICK)), 0) == base
    others = [
        recipe_digest(make_recipe("largest", QUICK), 1),
        recipe_digest(make_recipe("largest", {"steps": 4}), 0),
        recipe_digest(make_recipe("largest", QUICK | {"max_number": 29}), 0),
        recipe_digest(make_recipe("examples.largest_agent.model.largest_agent", QUICK), 0),
    ]
    monkeypatch.setattr("pipelinerl.tiny_model.recipes.question", lambda numbers: f"Of {numbers}?")
    others.append(recipe_digest(make_recipe("largest", QUICK), 0))
    assert len({base, *others}) == 6


def test_cache_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path, caplog):
    (tmp_path / "cache").write_text("no folder")
    built = build(tmp_path / "model", "largest", 0, QUICK, tmp_path / "cache")
    assert (built / "config.json").is_file()
    assert "model_not_cached" in caplog.text


def test_shape_of_a_recipe_is_that_of_its_model(tmp_path):
    folder = build(
        tmp_path / "model", "laps", 0, {"steps": 2, "layers": 3, "heads": 1, "positions": 8192, "num_stations": 18}
    )
    config = json.loads((folder / "config.json").read_text())
    shape = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "sliding_window")
    assert [config[name] for name in shape] == [3, 32, 1, 8192, 30]


def test_command_keeps_models_in_the_folder_of_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPELINERL_CACHE", str(tmp_path / "mine"))
    assert main(["--out", str(tmp_path / "model"), "--recipe", "largest", "--param", "steps=2"]) == 0
    (kept,) = (tmp_path / "mine" / "models").iterdir()
    assert digest(kept) == digest(tmp_path / "model")


DAMAGE = {"empty": lambda whole: b"", "never written": lambda whole: bytes(len(whole)), "cut": lambda whole: whole[:-2]}


@pytest.mark.parametrize(
    ("name", "damage"), [(TEMPLATE, "empty"), *((name, damage) for name in (*SETTINGS, WEIGHTS) for damage in DAMAGE)]
)
def test_model_that_a_power_cut_left_incomplete_is_built_again(model, tmp_path, name, damage):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    for built in (folder, cache / recipe_digest(make_recipe("largest", QUICK), 0)):
        shutil.copytree(model, built)
        (built / name).write_bytes(DAMAGE[damage]((built / name).read_bytes()))
    build(folder, "largest", 0, QUICK, cache, if_missing=True)
    assert digest(folder) == digest(model)


def test_folder_with_files_of_others_is_never_removed(model, tmp_path):
    whole, empty, other = tmp_path / "whole", tmp_path / "empty", tmp_path / "other"
    shutil.copytree(model, whole)
    empty.mkdir()
    shutil.copytree(model, other)
    (other / "config.json").write_bytes(b"")
    (other / "notes.txt").write_text("mine")
    found = [discard_broken(folder) for folder in (whole, empty, other, tmp_path / "missing")]
    assert found == [None, "it is empty", None, None]
    assert [folder.exists() for folder in (whole, empty, other)] == [True, False, True]


def test_model_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced, named = [], []
    monkeypatch.setattr(builder, "sync_path", lambda path: synced.append((path.name, bool(named))))
    monkeypatch.setattr(builder, "publish_model", lambda scratch, target: named.append(scratch.name))
    build(tmp_path / "model", "largest", 0, QUICK)
    (scratch,) = named
    before = {name for name, was_named in synced if not was_named}
    assert before == {*SETTINGS, WEIGHTS, TEMPLATE, scratch}
    assert synced[-1] == (tmp_path.name, True)
