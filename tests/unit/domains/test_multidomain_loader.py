"""Names with a domain before them reach the loader of the domain, as in PipelineRL's multi-domain experiments."""

from typing import Any

import pytest

from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.multidomain.loader import LOADERS, load_datasets, parse_name
from pipelinerl.errors import DomainError


def load_riddles(dataset_names: list[str], **params: Any) -> list[dict]:
    return [{"task": name, "params": params} for name in dataset_names]


OWN = {"logic": f"{__name__}.load_riddles"}


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        ("math::math_500", ("math", "math_500", None)),
        ("coding::taco@test", ("coding", "taco", "test")),
        ("math::org/set@main", ("math", "org/set@main", None)),
        (" math :: a::b ", ("math", "a::b", None)),
    ],
)
def test_name_has_domain_data_set_and_subset(entry: str, parts: tuple[str, str, str | None]) -> None:
    assert parse_name(entry) == parts


def test_every_domain_gets_its_data_sets_and_arguments() -> None:
    problems = load_datasets(
        ["logic::a@train", "guessing::test", "logic::b@train", "logic::c"],
        seed=None,
        per_domain_params={"logic": {"min_difficulty": 0.5}},
        loaders=OWN,
    )
    riddles = [problem for problem in problems if problem["domain"] == "logic"]
    assert [(riddle["task"], riddle["params"]) for riddle in riddles] == [
        ("a", {"min_difficulty": 0.5, "subset": "train"}),
        ("b", {"min_difficulty": 0.5, "subset": "train"}),
        ("c", {"min_difficulty": 0.5}),
    ]
    assert [riddle["dataset"] for riddle in riddles] == ["a + b", "a + b", "c"]
    assert {problem["domain"] for problem in problems} == {"logic", "guessing"}
    assert load_datasets(None) == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("math_500", "has no domain"),
        ("::a", "has no domain"),
        ("web::a", r"dataset_loader_params\.loaders\.web`.*counting"),
        ("coding::taco", r"dataset_loader_params\.loaders\.coding`"),
        ("livecodebench::livecodebench_v5", r"dataset_loader_params\.loaders\.livecodebench`"),
    ],
)
def test_name_that_no_loader_knows_is_refused_with_what_to_do(name: str, said: str) -> None:
    with pytest.raises(DomainError, match=said):
        load_datasets(name)


@pytest.mark.parametrize("target", sorted(set(LOADERS.values())))
def test_loaders_are_there(target: str) -> None:
    assert callable(resolve_function(target))


def test_games_are_pipelinerls() -> None:
    guessing = load_datasets("guessing::train")
    assert [problem["answer"] for problem in guessing[:3]] == [1, 383, 765]
    (first, *_) = load_datasets("counting::test_counting_problems")
    assert first["domain"] == "counting"
