"""A metric has one declaration, and whoever emits or reads it takes its name from there.

The type checker holds most of it: names in `MetricsLogger.log` and `Points` are `MetricName`s, which only declarations
give. Here is the rest: nobody makes such a name beside the catalogue, and the messages' metrics, which are plain texts
on the wire, are not read by a bare text either.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_type_hints

from pipelinerl.observability.catalogue import CATALOGUE, MetricName
from pipelinerl.observability.metrics import MetricsLogger, Point, read_metrics
from pipelinerl.rollouts import BaseMetrics

PACKAGE = Path(__file__).resolve().parents[2] / "pipelinerl"
OWN_OF_DOMAINS = set(BaseMetrics.model_fields)
"""Metrics of one rollout, which its domain fills in."""


def bare_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every literal that reads an attribute `metrics`, and of every `MetricName` that is made."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Attribute(attr="metrics"), slice=ast.Constant(value=str(name))):
                yield node.lineno, name
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(attr="metrics"), attr="get" | "pop"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case ast.Call(func=ast.Name(id="MetricName")):
                yield node.lineno, "MetricName"


def test_metrics_have_no_names_beside_their_declarations() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "catalogue.py"
        for line, name in bare_names(ast.parse(path.read_text()))
        if name not in OWN_OF_DOMAINS
    ]
    assert found == [], "take the name from pipelinerl/observability/catalogue.py"


def test_bare_names_are_seen() -> None:
    text = 'a.metrics["x"]\na.metrics.get("y", 0)\nMetricName("z")\na.metrics[LOSS]\nb["u"]'
    assert list(bare_names(ast.parse(text))) == [(1, "x"), (2, "y"), (3, "MetricName")]


def test_metrics_are_typed_where_they_are_written_and_read() -> None:
    assert get_type_hints(MetricsLogger.log)["values"] == Mapping[MetricName, float]
    assert get_type_hints(read_metrics)["return"] == list[Point]
    assert Point.__args__[0] is MetricName  # type: ignore[attr-defined]


def test_metrics_of_a_role_are_declared_once() -> None:
    for role, metrics in CATALOGUE.items():
        assert sorted(metrics.__members__) == sorted(metric.name for metric in metrics), f"two of {role} are equal"
