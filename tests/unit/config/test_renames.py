"""The table of PipelineRL's keys: every row leads to a key that exists, and no row hides one."""

import re

import pytest

from pipelinerl.config.load import compose, config_keys, is_free_form, suggestion
from pipelinerl.config.renames import GROUPS, NEEDLESS, OF_DOMAINS, RENAMES, Rename, rename_of
from pipelinerl.launcher.command_line import explain_refusal
from tests.says import says

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
    assert sum(len(rows) for rows in GROUPS.values()) + len(NEEDLESS) + len(OF_DOMAINS) == len(RENAMES)
    assert [row.old for rows in GROUPS.values() for row in rows if not row.new and not row.why] == []
    assert [row.old for row in RENAMES.values() if (row.kind == "moved") != bool(row.new)] == []


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("finetune.attempts", says("`attempts`")),
        ("finetune.max_lag", says("`max_lag_steps`", "samples", "optimizer steps")),
        ("finetune.max_lag", says("`1024 samples`")),
        ("debug.use_existing_llms", says("no equivalent", "`debug.existing_llms: [http://HOST:PORT]`")),
        ("finetune.model_class", says("`finetune.rl.advantage`")),
        ("wandb.use_wandb", says("`wandb.mode`", "true → online", "false → disabled")),
        ("finetune.interrupt_train_steps", says("no equivalent", "`finetune.max_train_steps`")),
        ("rewards.wrong_answer_finished", says("`rewards.wrong`")),
        ("finetune.memory_debug.enabled", says("no equivalent")),
        ("finetune.lora.base_model_8bit", says("no equivalent", "servers", "base")),
        ("preprocess.n_workers", says("not needed")),
        ("me.job_idx", says("not needed")),
    ],
)
def test_refusal_of_an_old_key_follows_the_table(old: str, said: str) -> None:
    assert re.search(said, suggestion(old))


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
