"""What roles emit is declared, and the page shows the declarations."""

import subprocess
import sys
from collections import Counter

import pytest

from pipelinerl.config import docs
from pipelinerl.finetune.rl.diagnostics import LAG_COUNTS
from pipelinerl.observability import catalogue
from pipelinerl.observability.catalogue import CATALOGUE, UndeclaredMetricWarning, undeclared, warn_undeclared


def test_catalogue_declares_every_name_once_and_explains_it():
    for role, metrics in CATALOGUE.items():
        assert [name for name, count in Counter(metric.name for metric in metrics).items() if count > 1] == [], role
        assert all(len(metric.meaning) > 5 for metric in metrics)


def test_catalogue_page_is_that_of_the_declarations():
    assert list(docs.stale({"docs/metrics.md": catalogue.markdown()})) == [], "run `make format`"


@pytest.mark.parametrize(
    ("role", "name", "known"),
    [
        ("finetune", "loss", True),
        ("finetune", "losses", False),
        ("finetune", LAG_COUNTS[0], True),
        ("finetune", "lag_histogram/trained", False),
        ("preprocessor", "dropped/lag", True),
        ("preprocessor_3", "dropped/lag", True),
        ("preprocessor", "dropped/lag/late", False),
        ("actor", "failures/timeout", True),
        ("actor_1", "rollouts", True),
        ("actor", "num_turns", True),
        ("actor", "queue_depth", False),
        ("actor", "math/num_turns", True),
        ("actor", "math/queue_depth", False),
        ("actor", "eval/math/test/num_turns", True),
        ("nobody", "loss", False),
    ],
)
def test_undeclared_knows_names_and_patterns(role: str, name: str, known: bool):
    assert undeclared(role, [name], domain_metrics=["num_turns"]) == ([] if known else [name])


def test_undeclared_takes_any_name_where_the_domains_are_unknown():
    assert undeclared("actor", ["num_turns", "math/num_turns", "a/b/c"]) == ["a/b/c"]


def test_warn_undeclared_names_the_metric():
    with pytest.warns(UndeclaredMetricWarning, match=r"'losses' of finetune is not declared: add it"):
        warn_undeclared("finetune", ["loss", "losses"])


def test_command_checks_the_checkout():
    argv = [sys.executable, "-m", "pipelinerl.observability.catalogue", "--check"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
