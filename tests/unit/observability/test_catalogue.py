"""What roles emit is declared, and the page shows the declarations."""

import json
import re
import subprocess
import sys

import pytest

from pipelinerl.config import docs
from pipelinerl.config.rules.experiment import METRIC_GROUPS
from pipelinerl.finetune.diagnostics import LAG_COUNTS
from pipelinerl.observability import catalogue
from pipelinerl.observability.catalogue import (
    CATALOGUE,
    ActorMetric,
    PreprocessorMetric,
    TrainerMetric,
    UndeclaredMetricWarning,
    unclear_metrics,
    undeclared,
    warn_undeclared,
)
from tests.says import says


def test_catalogue_explains_every_metric():
    assert [metric for metrics in CATALOGUE.values() for metric in metrics if len(metric.meaning) <= 5] == []


def test_metric_is_its_name_and_knows_its_role():
    point = {TrainerMetric.LOSS: 0.5, ActorMetric.FAILURES.of(reason="timeout"): 3}
    assert json.loads(json.dumps(point)) == {"loss": 0.5, "failures/timeout": 3}
    assert (point["loss"], f"{TrainerMetric.LOSS}", str(TrainerMetric.LOSS)) == (0.5, "loss", "loss")  # type: ignore[index]
    assert (TrainerMetric.LOSS.role, ActorMetric.FAILURES.role) == ("finetune", "actor")


def test_metric_with_a_part_finds_its_values():
    point = dict.fromkeys(("failures/timeout", "failures/domain", "failures/a/b", "groups_dropped/domain"), 1.0)
    assert ActorMetric.FAILURES.found(point) == {"timeout": 1.0, "domain": 1.0}  # type: ignore[arg-type]
    counts = {PreprocessorMetric.SURVIVORSHIP_COUNT.of(outcome="lag"): 2.0}
    assert PreprocessorMetric.SURVIVORSHIP_COUNT.found(counts) == {"lag": 2.0}
    assert PreprocessorMetric.SURVIVORSHIP_MEAN_TOKENS.found(counts) == {}


def test_catalogue_page_is_that_of_the_declarations():
    assert list(docs.stale({"docs/metrics.md": catalogue.metrics_page()})) == [], "run `make format`"


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
        ("actor", "openai/gsm8k:main@train/num_turns", True),
        ("actor", "openai/gsm8k:main@train/queue_depth", False),
        ("actor", "eval//data/rows.jsonl/num_turns", True),
        ("actor", "eval/math//data/rows.jsonl/num_turns", True),
        ("actor", "two\nlines/num_turns", True),
        ("actor", "loop_blocked_s/a/b", False),
        ("nobody", "loss", False),
    ],
)
def test_undeclared_knows_names_and_patterns(role: str, name: str, known: bool):
    assert undeclared(role, [name], domain_metrics=["num_turns"]) == ([] if known else [name])


def test_undeclared_takes_any_name_where_the_domains_are_unknown():
    assert undeclared("actor", ["num_turns", "math/num_turns", "openai/gsm8k/c"]) == []
    assert undeclared("preprocessor", ["tokens", "math/tokens"]) == ["math/tokens"]


def test_no_domain_has_the_name_of_a_group_of_the_actors_own_metrics():
    own = {name.partition("/")[0] for name in ActorMetric if "/" in name and not name.startswith("{")}
    assert own == set(METRIC_GROUPS)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["reward", "success", "no_error", "no_answer", "turns", "turns per game", "length_max", "a:b", "数"], ()),
        (["step"], ("'step'", "run itself")),
        (["time"], ("'time'", "run itself")),
        (["version"], ("'version'", "run itself")),
        (["latency_s"], ("'latency_s'", "run itself")),
        (["format/ok"], ("'format/ok'", "slash")),
        ([""], ("''", "empty")),
        (["score", "score_max"], ("'score_max'", "max", "'score'")),
        (["reward", "reward_std"], ("'reward_std'", "std", "'reward'")),
    ],
)
def test_metrics_of_a_domain_are_told_apart_from_each_other_and_from_the_runs_own(names: list[str], words: tuple):
    assert bool(unclear_metrics(names)) == bool(words)
    assert re.search(says(*words), unclear_metrics(names) or "")


def test_warn_undeclared_names_the_metric():
    with pytest.warns(UndeclaredMetricWarning, match=says("losses", "finetune", "not declared")):
        warn_undeclared("finetune", ["loss", "losses"])


def test_command_checks_the_checkout():
    argv = [sys.executable, "-m", "pipelinerl.observability.catalogue", "--check"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
