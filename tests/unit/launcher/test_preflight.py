"""Checks before a start: packages that another build of torch was made for, and models."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.errors import ConfigError, DatasetError
from pipelinerl.launcher import domain_check, preflight
from pipelinerl.launcher.model_build import discard_broken_model, needs_tiny_model
from pipelinerl.launcher.preflight import (
    _is_plain,
    check_companions,
    check_context,
    check_judges,
)
from tests.says import says


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, with a CPU build of torch."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    describe(tmp_path, "torch", "2.13.0+cpu")
    return tmp_path


def describe(folder: Path, package: str, version: str) -> None:
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


def write(folder: Path, package: str, version: str, code: str) -> None:
    describe(folder, package, version)
    (folder / f"{package}.py").write_text(code)


BROKEN = "raise RuntimeError('operator torchvision::nms does not exist')"


def test_torchvision_that_cannot_be_loaded_is_refused_with_what_to_remove(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0", BROKEN)
    with pytest.raises(ConfigError, match=says("torchvision", "torch 2.13.0+cpu", "nms", "pip uninstall")):
        check_companions()


def test_torchvision_of_another_kind_that_loads_passes(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0a1", "")
    check_companions()


def test_torchvision_of_the_same_kind_is_not_loaded(installed: Path) -> None:
    write(installed, "torchvision", "0.28.0+cpu", BROKEN)
    check_companions()


@pytest.mark.parametrize(
    ("described", "is_plain"),
    [
        ({"model_type": "qwen2"}, True),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, True),
        ({"model_type": "llama", "rope_scaling": None}, True),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 4.0}}, False),
        ({"model_type": "qwen2", "rope_parameters": {"rope_type": "longrope"}}, False),
        ({"model_type": "phi3"}, False),
        ({}, True),
    ],
)
def test_models_are_compared_before_the_start_unless_nothing_in_them_depends_on_lengths(
    described: dict, is_plain: bool
) -> None:
    assert _is_plain(described) == is_plain


@pytest.mark.parametrize(
    ("described", "longest", "is_refused"),
    [
        ({"max_position_embeddings": 96}, 96, False),
        ({"max_position_embeddings": 96}, 97, True),
        ({"text_config": {"max_position_embeddings": 96}}, 97, True),
        ({"max_position_embeddings": 96, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 97, True),
        ({"max_position_embeddings": 96, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 97, False),
        ({}, 97, False),
    ],
)
def test_requests_longer_than_the_model_computes_are_refused(
    tmp_path: Path, described: dict, longest: int, is_refused: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    overrides = [f"model_path={tmp_path}", f"vllm_config.vllm_kwargs.max_model_len={longest}"]
    config = parse(compose("base_cpu", [*overrides, f"output_dir={tmp_path}"]))
    facts = says("vllm_config.vllm_kwargs.max_model_len", 97, 96, tmp_path)
    with pytest.raises(ConfigError, match=facts) if is_refused else nullcontext():
        check_context(config)


@pytest.mark.parametrize(
    ("max_tokens", "max_answer_chars", "refused", "warned"),
    [(4000, 20_000, True, False), (1024, 20_000, False, True), (1024, 4000, False, False)],
)
def test_judge_whose_context_has_no_room_for_an_answer_is_refused_or_warned_of(
    tmp_path: Path, max_tokens: int, max_answer_chars: int, refused: bool, warned: bool
) -> None:
    """4,096 tokens of context. The built-in protocol and template have about 950 characters: some 240 tokens."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    judge = f"{{name: helpful, model_path: {tmp_path}, max_tokens: {max_tokens}, max_answer_chars: {max_answer_chars}}}"
    overrides = [f"judges=[{judge}]", "world.preprocessor_fraction=1", f"output_dir={tmp_path}"]
    config = parse(compose("base", [*overrides, f"model_path={tmp_path}"]))
    warnings: list[str] = []
    facts = says("judges.max_tokens", "helpful", 4096, 4000)
    with pytest.raises(ConfigError, match=facts) if refused else nullcontext():
        warnings = check_judges(config)
    assert [("judges.max_answer_chars" in text) for text in warnings] == [True] * warned


def test_context_of_a_judge_elsewhere_is_not_known(tmp_path: Path) -> None:
    judge = "{name: helpful, model_path: gpt, url: 'https://host/v1', max_tokens: 100000}"
    config = parse(compose("base", [f"judges=[{judge}]", f"model_path={tmp_path}", f"output_dir={tmp_path}"]))
    assert check_judges(config) == []


def test_loss_that_never_returns_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TORCH_TIMEOUT_S", 0.2)
    own = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout", "finetune.rl.policy_loss=my.loss"]
    with pytest.raises(ConfigError, match=says("finetune.rl.policy_loss", "my.loss", "has not ended after 0.2 s")):
        preflight.check_objective(parse(compose("base", own)), {})


def test_model_whose_trial_never_ends_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "TORCH_TIMEOUT_S", 0.2)
    (tmp_path / "config.json").write_text('{"model_type": "odd"}')
    own = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout", f"model_path={tmp_path}"]
    with pytest.raises(ConfigError, match=says("model_path", str(tmp_path), "has not ended after 0.2 s")):
        preflight.check_architecture(parse(compose("base", own)), 1)


@pytest.mark.parametrize(("engine", "dtype", "ranks"), [("fsdp2", "bfloat16", 1), ("auto", "float16", 2)])
def test_model_of_float32_constants_is_refused_in_the_engine_that_does_not_narrow_them(
    engine: str, dtype: str, ranks: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "minimax"}')
    own = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout", f"model_path={tmp_path}"]
    own += [f"finetune.engine={engine}", f"finetune.dtype={dtype}"]
    with pytest.raises(ConfigError, match=says(engine, f"{ranks} rank", dtype, "fsdp2", "minimax", "ddp", "float32")):
        preflight.check_architecture(parse(compose("base", own)), ranks)


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_quantized_weights_are_refused(tmp_path: Path, method: str) -> None:
    described = {"model_type": "qwen2", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    own = ["output_dir=x", "dataset_loader=a.load", "actor.rollout_policy=a.rollout", f"model_path={tmp_path}"]
    with pytest.raises(ConfigError, match=says("model_path", str(tmp_path), method, "plain weights")):
        preflight.check_architecture(parse(compose("base", own)), 1)


def test_companion_whose_import_never_ends_is_refused_in_one_line(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TORCH_TIMEOUT_S", 0.2)
    write(installed, "torchvision", "0.28.0", "import time; time.sleep(600)")
    with pytest.raises(ConfigError, match=says("torchvision", "has not ended after 0.2 s")):
        check_companions()


def test_incomplete_tiny_model_is_removed_with_one_line_and_built_again(tmp_path: Path) -> None:
    model, said = tmp_path / "model", list[str]()
    model.mkdir()
    (model / "config.json").touch()
    config = parse(compose("quickstart", [f"output_dir={tmp_path}", f"model_path={model}"]))
    discard_broken_model(config, said.append)
    discard_broken_model(config, said.append)
    assert said == [f"`model_path` '{model}' is incomplete (config.json), as after a power cut: it is built again"]
    assert needs_tiny_model(config, [])


def test_damaged_model_of_others_is_refused_by_name_and_stays(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_emb')
    config = parse(compose("base_cpu", [f"model_path={tmp_path}", f"output_dir={tmp_path}"]))
    discard_broken_model(config, lambda line: None)
    with pytest.raises(ConfigError, match=says(tmp_path / "config.json", "is damaged", "line 1")):
        check_context(config)


def test_refusal_of_a_domain_names_its_data_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(container: dict, warnings: list[str]) -> None:
        raise DatasetError("row 7 is no problem", "rows.jsonl")

    monkeypatch.setattr(domain_check, "check_domains", refuse)
    child = lambda *_, job, timeout_s: json.loads(json.dumps(domain_check.verdict_on(job, timeout_s)))  # noqa: E731
    monkeypatch.setattr(preflight, "run_trial", child)
    with pytest.raises(DatasetError, match="row 7") as refused:
        preflight.check_domain({})
    assert refused.value.names == ("rows.jsonl",)
