"""Evidence about a run from values made by hand, with the defaults of the configuration."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from pipelinerl.config.load import compose
from pipelinerl.config.sections import Config
from pipelinerl.inspect.series import Series
from pipelinerl.inspect.why.evidence import Evidence
from pipelinerl.observability.metrics import Point


@cache
def config(*overrides: str) -> Config:
    return compose("base", list(overrides))


def evidence(
    *, finetune: Sequence[Point] = (), actor: Sequence[Point] = (), preprocessor: Sequence[Point] = (), **changes: Any
) -> Evidence:
    series = Series(finetune=finetune, actor=actor, preprocessor=preprocessor)
    return Evidence(**{"cfg": config(), "series": series, **changes})
