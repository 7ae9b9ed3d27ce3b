"""What Hydra gets of the user's command line, and how its errors are told."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException

from pipelinerl.config.load import compose
from pipelinerl.errors import EXIT_REFUSED
from pipelinerl.launcher import preflight
from pipelinerl.launcher.command_line import QUIET_HYDRA, explain_refusal, hydra_arguments, main, quoted


@pytest.mark.parametrize(
    ("typed", "given"),
    [
        (["--config-name=quickstart", "seed=1"], ["--config-name=quickstart", "seed=1"]),
        (["seed=1", "--help"], ["--help", "seed=1"]),
        (["seed=1", "--cfg", "job", "attempts=2"], ["--cfg", "job", "seed=1", "attempts=2"]),
        (["-cn", "a", "~x"], ["-cn", "a", "~x"]),
        (["+dry_run=true", "+llm.parameters.stop=[a]"], ["dry_run=true", "+llm.parameters.stop=[a]"]),
        (["++seed=1", "+finetune.nope=1"], ["++seed=1", "+finetune.nope=1"]),
        (["finetune={seq_length: 9}", "seeed={a: 1}"], ["+finetune={seq_length: 9}", "seeed={a: 1}"]),
        (["+llm.parameters={a: 1}", "++llm.parameters={a: 1}"], ["+llm.parameters={a: 1}", "++llm.parameters={a: 1}"]),
    ],
)
def test_hydra_arguments_puts_options_first_and_sets_the_plus_that_hydra_needs(
    typed: list[str], given: list[str]
) -> None:
    assert hydra_arguments(typed) == [*given, *QUIET_HYDRA]


def test_mapping_on_the_command_line_is_merged() -> None:
    """Hydra alone refuses a key that the mapping does not have yet."""
    (override,) = hydra_arguments(["dataset_loader_params={max_number: 7, own: 1}"])[: -len(QUIET_HYDRA)]
    given = compose("quickstart", [override]).dataset_loader_params
    assert given == {"max_number": 7, "num_test_problems": 512, "own": 1}


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("seeed", "`seeed` is not a configuration key; did you mean `seed`?"),
        (
            "llm.parameters.stop",
            "`llm.parameters.stop` is not in the configuration yet: add it with +llm.parameters.stop=…",
        ),
    ],
)
def test_explain_unknown_override_in_one_line(key: str, told: str) -> None:
    error = ConfigCompositionException(
        f"Could not override '{key}'.\nTo append to your config use +{key}=1\nKey not in struct"
    )
    assert explain_refusal(error) == told


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (
            "llm.parameters.max_tokns=3",
            "`llm.parameters.max_tokns` is not in the configuration; did you mean `llm.parameters.max_tokens`? "
            "A new key is added with +llm.parameters.max_tokns=…",
        ),
        ("finetune=grp", "`finetune=grp`: there is no file grp.yaml in conf/finetune; did you mean `grpo`?"),
        ("streams=kafka", "`streams=kafka`: there is no file kafka.yaml in conf/streams: it may be files, redis"),
    ],
)
def test_explain_what_hydra_refuses_by_the_names_that_are_there(typed: str, told: str) -> None:
    with pytest.raises(HydraException) as refused:
        compose("quickstart", [typed])
    assert explain_refusal(refused.value) == told


def test_explain_misspelt_option_of_vllm_names_the_nearest_one_before_the_missing_plus() -> None:
    def told(option: str) -> str:
        return explain_refusal(ConfigCompositionException(f"Could not override 'vllm_config.vllm_kwargs.{option}'."))

    assert told("max_modl_len").endswith("; did you mean `max-model-len`?")
    assert told("swap_space_x").startswith("`vllm_config.vllm_kwargs.swap_space_x` is no option of vLLM")
    assert "add it with +vllm_config.vllm_kwargs.block_size=" in told("block_size")


def test_explain_other_errors_keep_their_words_on_one_line() -> None:
    assert explain_refusal(ConfigCompositionException("first\n  second")) == "first second"


@pytest.mark.parametrize(
    "text",
    [
        "a b",
        "a=b",
        "a,b",
        "a:b",
        "é/数学",
        "a[1]",
        "{b}",
        "#",
        "50%",
        'a"b',
        "a'b",
        "a\\b",
        "a\\",
        'a\\"b',
        "$x",
        "null",
        "1",
    ],
)
def test_quoted_text_is_read_as_that_text(text: str) -> None:
    assert OverridesParser.create().parse_override(f"output_dir={quoted(text)}").value() == text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"defaults: quickstart\n", "defaults must be a list (got str); write `defaults: [base, _self_]`"),
        ("defaults: [base]\n".encode("utf-16"), "mine.yaml is not text in UTF-8: save it so"),
        (b"defaults: [base, {3: [a]}]\n", "error: the configuration cannot be composed: "),
    ],
)
def test_file_that_is_no_configuration_is_refused_in_one_line(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    assert main([f"--config-dir={tmp_path}", "--config-name=mine", "output_dir=x"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert told in line


@pytest.mark.parametrize("typed", ["quickstart", "qickstart"])
def test_name_of_a_configuration_without_its_option_is_told_the_option(
    typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([typed, "output_dir=x"]) == 2
    assert "--config-name=quickstart" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["one", "results/${seed}", "a,b"])
def test_runs_of_a_sweep_have_a_folder_each_or_are_refused(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "check_domain", lambda container: [])
    swept = ["seed=0,1"] if folder != "a,b" else []
    arguments = ["--config-name=quickstart", "--multirun", f"output_dir={folder}", *swept, "dry_run=true"]
    code = main([*arguments, f"hydra.sweep.dir={tmp_path / 'sweep'}"])
    told = capsys.readouterr()
    if folder == "one":
        assert code == EXIT_REFUSED
        assert told.err.count("all runs of --multirun share output_dir=one") == 1
        assert told.out == ""
    else:
        assert code == 0
        assert told.out.count("dry run: nothing was started") == 2
