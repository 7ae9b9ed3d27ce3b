"""Maps a verdict to a reward with the table of the config group ``rewards``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from pipelinerl.config.renames import OUTCOMES, hint, rename_of
from pipelinerl.errors import DomainError
from pipelinerl.records.verdicts import Verdict
from pipelinerl.rollouts import BaseMetrics

SPELLED = frozenset(f"{name}_{end}" for name in OUTCOMES.values() for end in ("finished", "not_finished"))
"""The keys of PipelineRL's tables."""


def spelled_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the table with PipelineRL's keys added: two for every verdict, finished and cut. Existing keys stay."""
    if not OUTCOMES.keys() <= given.keys():
        return dict(given)
    unfinished = given.get("unfinished")
    cut = unfinished if isinstance(unfinished, Mapping) else {}
    table = dict(given)
    for verdict, name in OUTCOMES.items():
        table.setdefault(f"{name}_finished", given[verdict])
        whole = given[verdict] if unfinished is None or isinstance(unfinished, Mapping) else unfinished
        table.setdefault(f"{name}_not_finished", cut.get(verdict, whole))
    return table


def with_both_spellings(cfg: DictConfig) -> DictConfig:
    """Returns the configuration with PipelineRL's keys in `rewards`, for domains that were written for PipelineRL."""
    if "rewards" not in cfg:
        return cfg
    given = OmegaConf.to_container(cfg.rewards)
    assert isinstance(given, dict)
    both = OmegaConf.merge(cfg, {"rewards": spelled_out({str(name): value for name, value in given.items()})})
    assert isinstance(both, DictConfig)
    return both


@dataclass(frozen=True, kw_only=True)
class VerdictRewards:
    """Rewards by verdict."""

    correct: float
    wrong: float
    """A well-formed answer that is wrong. Partial credit lies between this and ``correct``."""
    no_answer: float
    unparsable: float
    unfinished: float | Mapping[str, float] | None
    """Reward of a completion that was cut by its token limit: a number for all verdicts, or a mapping from verdicts.
    With None, and for verdicts that the mapping lacks, a cut completion is rewarded like any other."""

    @classmethod
    def of(cls, cfg: DictConfig) -> "VerdictRewards":
        """Returns the table of a run. Raises ``DomainError`` for a missing, unknown or non-numeric entry."""
        return cls.from_mapping({name: value for name, value in cfg.rewards.items() if name not in SPELLED})

    @classmethod
    def from_mapping(cls, given: dict[str, Any]) -> "VerdictRewards":
        names = {field.name for field in fields(cls)}
        if set(given) != names:
            wrong = sorted(set(given) ^ names)
            row = rename_of(f"rewards.{wrong[0]}")
            said = f"; `{row.old}`: {hint(row)}" if row else ""
            raise DomainError(f"`rewards` must have exactly {sorted(names)}: {wrong} missing or unknown{said}")
        unfinished = given["unfinished"]
        by_verdict = dict(unfinished) if isinstance(unfinished, Mapping | DictConfig) else {}
        for verdict in sorted(by_verdict.keys() - (names - {"unfinished"})):
            raise DomainError(f"`rewards.unfinished.{verdict}`: use one of {sorted(names - {'unfinished'})}")
        entries = given | {f"unfinished.{verdict}": value for verdict, value in by_verdict.items()}
        for name, value in entries.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number and not (name == "unfinished" and (value is None or by_verdict)):
                raise DomainError(f"`rewards.{name}` is {value!r}: it must be a number")
        return cls(**given | {"unfinished": by_verdict or unfinished})

    def reward(self, verdict: Verdict, *, finished: bool) -> float:
        """Returns the reward of a judged completion.

        Args:
            verdict: any status but ``error``, which the caller must raise.
            finished: False if the completion was cut by its token limit.
        """
        assert verdict.status != "error", "a verifier error is never a reward"
        cut = None if finished else self.unfinished
        if isinstance(cut, Mapping):
            cut = cut.get(verdict.status)
        if cut is not None:
            return cut
        if verdict.status == "wrong":
            return self.wrong + verdict.score * (self.correct - self.wrong)
        return getattr(self, verdict.status)

    def metrics(self, verdict: Verdict, *, finished: bool) -> BaseMetrics:
        """Builds the rollout's metrics for a verdict. Arguments as in ``reward``."""
        return BaseMetrics(
            reward=self.reward(verdict, finished=finished),
            success=verdict.status == "correct",
            no_error=verdict.status != "unparsable",
            no_answer=verdict.status == "no_answer",
        )
