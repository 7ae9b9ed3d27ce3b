from pathlib import Path

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from pipelinerl.config.load import CONF_DIR
from pipelinerl.domains.rewards import VerdictRewards, with_both_spellings
from pipelinerl.errors import DomainError
from pipelinerl.records.verdicts import Verdict
from tests.says import says

TABLE = {"correct": 1.0, "wrong": 0.0, "no_answer": -1.0, "unparsable": -0.5, "unfinished": None}


class CopiedTable(BaseModel):
    """What a module copied from PipelineRL defines for itself."""

    wrong_answer_not_finished: float
    wrong_answer_finished: float
    no_answer_not_finished: float
    no_answer_finished: float
    unparsable_not_finished: float
    unparsable_finished: float
    correct_answer_not_finished: float
    correct_answer_finished: float
    buffer_tokens: int = 0


@pytest.mark.parametrize(
    ("status", "score", "reward"),
    [("correct", 1, 1), ("wrong", 0, 0), ("wrong", 0.25, 0.25), ("no_answer", 0, -1), ("unparsable", 0, -0.5)],
)
def test_reward_follows_the_table_with_partial_credit(status, score, reward):
    table = VerdictRewards.from_mapping(TABLE)
    assert table.reward(Verdict(status=status, score=score), finished=True) == reward


def test_unfinished_completion_has_its_own_reward_only_where_the_table_gives_one():
    correct = Verdict(status="correct", score=1)
    assert VerdictRewards.from_mapping(TABLE).reward(correct, finished=False) == 1
    assert VerdictRewards.from_mapping(TABLE | {"unfinished": -2.0}).reward(correct, finished=False) == -2


def test_unfinished_completion_may_have_a_reward_by_verdict():
    table = VerdictRewards.of(OmegaConf.create({"rewards": TABLE | {"unfinished": {"correct": 0.5, "wrong": -2}}}))
    given = [("correct", 1.0), ("wrong", 0.0), ("no_answer", 0.0)]
    rewards = [table.reward(Verdict(status=status, score=score), finished=False) for status, score in given]
    assert rewards == [0.5, -2, -1]  # no_answer is not in it: as if it had ended by itself
    assert table.reward(Verdict(status="correct", score=1), finished=True) == 1


def test_pipelinerls_names_are_refused_with_ours():
    with pytest.raises(DomainError, match=says("rewards.wrong")):
        VerdictRewards.from_mapping(TABLE | {"wrong_answer_finished": -0.5})


def test_verifier_error_has_no_reward():
    with pytest.raises(AssertionError, match="never a reward"):
        VerdictRewards.from_mapping(TABLE).reward(Verdict(status="error"), finished=True)


@pytest.mark.parametrize(
    "change",
    [
        {"correct": "one"},
        {"correct": True},
        {"bonus": 1.0},
        {"wrong": None},
        {"unfinished": "no"},
        {"unfinished": {"right": 1}},
        {"unfinished": {"wrong": None}},
    ],
)
def test_bad_table_is_refused_by_key(change):
    with pytest.raises(DomainError, match=next(iter(change))):
        VerdictRewards.from_mapping(TABLE | change)


@pytest.mark.parametrize("file", sorted((CONF_DIR / "rewards").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_table_is_valid_and_prefers_correct(file: Path):
    table = VerdictRewards.of(OmegaConf.create({"rewards": OmegaConf.load(file)}))
    others = max(table.wrong, table.no_answer, table.unparsable)
    assert table.correct == others if file.stem == "format" else table.correct > others


def test_copied_table_of_pipelinerl_finds_its_names_and_ours_finds_its_own():
    """A domain's own model with PipelineRL's eight fields, filled as modules do it: `RewardTable(**cfg.rewards)`."""
    given = OmegaConf.create({"rewards": TABLE | {"unfinished": {"correct": 0.5}}, "seed": 3})
    cfg = with_both_spellings(given)
    table = CopiedTable(**dict(cfg.rewards))
    assert (table.correct_answer_finished, table.correct_answer_not_finished) == (1.0, 0.5)
    assert (table.wrong_answer_finished, table.no_answer_not_finished, table.unparsable_finished) == (0.0, -1.0, -0.5)
    assert VerdictRewards.of(cfg) == VerdictRewards.of(given)
    assert cfg.seed == 3
    own = OmegaConf.create({"rewards": {"bonus": 2.0}})
    assert with_both_spellings(own) == own
