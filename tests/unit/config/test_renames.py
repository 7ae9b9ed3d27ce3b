"""The table of PipelineRL's keys: every row leads to a key that exists, and no row hides one."""

import pytest

from pipelinerl.config.load import compose, config_keys, is_free_form, suggestion
from pipelinerl.config.renames import GROUPS, RENAMES, Rename, rename_of
from pipelinerl.launch import explain_refusal

SAME_NAME = {
    "finetune.attn_implementation",
    "debug.mode",
    "eval_every_n_versions",
    "finetune.weight_update_interval",
    "finetune.lora.target_modules",
}
"""Keys that are here too, with values of another meaning."""


def test_every_row_leads_to_a_key_that_exists() -> None:
    targets = {row.new for row in RENAMES.values() if row.new}
    assert sorted(new for new in targets if new not in config_keys() and not is_free_form(new)) == []


def test_no_row_is_about_a_key_that_is_here_too() -> None:
    assert {old for old in RENAMES if old in config_keys()} == SAME_NAME


def test_every_row_is_there_once_and_says_why_there_is_no_key() -> None:
    assert sum(len(rows) for rows in GROUPS.values()) == len(RENAMES)
    assert [row.old for row in RENAMES.values() if not row.new and not row.why] == []
    assert [row.old for row in RENAMES.values() if (row.fate == "moved") != bool(row.new)] == []


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("finetune.attempts", "`attempts`"),
        ("finetune.max_lag", "`max_lag_steps` here (counted in samples there and in optimizer steps here"),
        ("finetune.max_lag", "e.g. `1024 samples`"),
        ("debug.use_existing_llms", "has no equivalent here: name the servers: `debug.existing_llms"),
        ("finetune.model_class", "`finetune.rl.advantage`"),
        ("wandb.use_wandb", "`wandb.mode` here (true → online; false → disabled)"),
        ("finetune.interrupt_train_steps", "has no equivalent here: `finetune.max_train_steps` ends the run"),
        ("rewards.wrong_answer_finished", "`rewards.wrong`"),
        ("finetune.memory_debug.enabled", "has no equivalent"),
        ("finetune.lora.base_model_8bit", "has no equivalent here: servers sample from the whole base"),
        ("preprocess.n_workers", "is not needed here"),
        ("me.job_idx", "is not needed here"),
    ],
)
def test_refusal_of_an_old_key_follows_the_table(old: str, said: str) -> None:
    assert said in suggestion(old)


def test_refusal_on_the_command_line_follows_the_table() -> None:
    overrides = [
        f"{old}=1" for old in ("debug.use_existing_llms", "finetune.attempts", "rewards.correct_answer_finished")
    ]
    for override in overrides:
        with pytest.raises(Exception, match="Could not override") as refused:
            compose("base", ["output_dir=x", override])
        assert "PipelineRL's key" in explain_refusal(refused.value)


def test_spelling_still_leads_where_the_table_has_no_row() -> None:
    assert rename_of("finetune.learnin_rate") is None
    assert suggestion("finetune.learnin_rate") == "; did you mean `finetune.learning_rate`?"


def test_rows_of_a_section_are_found_for_what_is_in_it() -> None:
    row = rename_of("fsdp.param_dtype")
    assert isinstance(row, Rename)
    assert row.old == "fsdp.*"
