"""A domain that breaks its contract is refused in words that name the key and the fix."""

import sys
import types
from typing import Any

import pytest

from pipelinerl.config.load import compose, parse
from pipelinerl.domains.contract import Domain, cfg_of_domains, domains_of
from pipelinerl.errors import DomainError
from tests.says import says


async def rollout(cfg: Any, llm: Any, problem: Any, session: Any) -> None: ...


class Callable_:
    async def __call__(self, cfg: Any, llm: Any, problem: Any, session: Any) -> None: ...


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    made = types.ModuleType("made_domain")
    made.rollout, made.callable, made.load = rollout, Callable_(), lambda names: [{"name": n} for n in names]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_domain", made)
    return made


def domain(*overrides: str) -> Domain:
    names = ["dataset_loader=made_domain.load", "actor.rollout_policy=made_domain.rollout", "output_dir=x"]
    (found,) = domains_of(parse(compose("base", [*names, *overrides])))
    return found


def test_domain_of_the_top_level_has_its_keys_and_a_name(module: types.ModuleType) -> None:
    found = domain()
    assert (found.section.name, found.key("rollout_policy"), found.key("dataset_loader")) == (
        "made_domain",
        "actor.rollout_policy",
        "dataset_loader",
    )
    assert found.rollout() is module.rollout
    assert found.train_problems() == [{"name": "train"}]


@pytest.mark.parametrize("returned", [[{"a": 1}], ({"a": 1},), iter([{"a": 1}])])
def test_problems_may_be_any_sequence_of_dicts(module: types.ModuleType, returned: Any) -> None:
    module.load = lambda names: returned  # type: ignore[attr-defined]
    assert domain().train_problems() == [{"a": 1}]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, says("`dataset_loader`", "made_domain.load", "list of dicts", "NoneType")),
        ({"a": 1}, says("list of dicts", "not dict")),
        ("text", says("list of dicts", "not str")),
        ([{"a": 1}, 2], says("problem 1 of ['train']", "int (2)", "dict")),
        ([], says("no problems", "train_dataset_names=['train']")),
        (7, says("`dataset_loader`", "made_domain.load", "['train']", "TypeError: 'int' object is not iterable")),
    ],
)
def test_problems_of_another_shape_are_refused(module: types.ModuleType, returned: Any, message: str) -> None:
    module.load = lambda names: returned  # type: ignore[attr-defined]
    with pytest.raises(DomainError, match=message):
        domain().train_problems()


async def load_async(names: list[str]) -> list[dict]:
    return []


def load_without_params(names: list[str]) -> list[dict]:
    return [{}]


@pytest.mark.parametrize(
    ("loader", "overrides", "message"),
    [
        (load_async, [], says("coroutine function", "`def`")),
        (
            load_without_params,
            ["+dataset_loader_params.n=1"],
            says("`dataset_loader`", "dataset_names, **dataset_loader_params", "'n'"),
        ),
    ],
)
def test_loader_that_cannot_be_called_is_refused(
    module: types.ModuleType, loader: Any, overrides: list[str], message: str
) -> None:
    module.load = loader  # type: ignore[attr-defined]
    with pytest.raises(DomainError, match=message):
        domain(*overrides).train_problems()


@pytest.mark.parametrize(
    ("dotted", "message"),
    [
        ("made_domain.load", says("`actor.rollout_policy`", "made_domain.load", "`async def`")),
        ("made_domain.nothing", "made_domain has no 'nothing'"),
        ("no_such_module.rollout", "no module 'no_such_module'"),
        (
            "made_domain.short",
            says("`actor.rollout_policy`", "made_domain.short(cfg: Any)", "(cfg, llm, problem, session)"),
        ),
    ],
)
def test_rollout_that_cannot_be_used_is_refused(module: types.ModuleType, dotted: str, message: str) -> None:
    async def short(cfg: Any) -> None: ...

    module.short = short  # type: ignore[attr-defined]
    with pytest.raises(DomainError, match=message):
        domain(f"actor.rollout_policy={dotted}").rollout()


def test_rollout_may_be_an_object(module: types.ModuleType) -> None:
    assert domain("actor.rollout_policy=made_domain.callable").rollout() is module.callable


def test_judge_group_stands_beside_the_rollout_function_or_at_it(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def judge_group(cfg: Any, problem: Any, rollouts: Any, session: Any) -> list[float]:
        return []

    def blocking(cfg: Any, problem: Any, rollouts: Any, session: Any) -> list[float]:
        return []

    async def short(cfg: Any, problem: Any, rollouts: Any) -> list[float]:
        return []

    assert domain().group_judge(rollout) is None
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "judge_group", judge_group, raising=False)
        assert domain().group_judge(rollout) is judge_group
    monkeypatch.setattr(rollout, "__module__", module.__name__)
    module.judge_group = judge_group  # type: ignore[attr-defined]
    assert domain().group_judge(rollout) is judge_group
    for wrong, facts in ((blocking, ("not async",)), (short, ("cannot be called with", "session"))):
        module.judge_group = wrong  # type: ignore[attr-defined]
        with pytest.raises(DomainError, match=says("made_domain.rollout with judge_group", *facts)):
            domain().group_judge(rollout)


def test_several_domains_are_named_in_their_keys(module: types.ModuleType) -> None:
    one = (
        "{name: a, weight: 1, rollout_policy: made_domain.rollout, dataset_loader: made_domain.nothing, "
        "dataset_loader_params: {}, train_dataset_names: [x], test_dataset_names: []}"
    )
    cfg = parse(compose("base", ["output_dir=x", "dataset_loader=a.b", "actor.rollout_policy=a.c", f"domains=[{one}]"]))
    (found,) = domains_of(cfg)
    assert found.test_problems() == []
    with pytest.raises(DomainError, match=r"`domains.a.dataset_loader`"):
        found.train_problems()


def test_required_problem_keys_are_checked(module: types.ModuleType) -> None:
    module.rollout.required_problem_keys = ("answer",)  # type: ignore[attr-defined]
    try:
        with pytest.raises(DomainError, match=says("problem 1", "'answer'")):
            domain().check_keys(module.rollout, [{"answer": 1}, {"question": 2}])
    finally:
        del module.rollout.required_problem_keys  # type: ignore[attr-defined]


def test_loader_gets_the_value_of_a_reference_and_may_not_put_it_into_problems(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "planted-'4711")
    key = "+dataset_loader_params.my={api_key: {env: MY_KEY}}"
    module.load = lambda names, my: [{"length": len(my["api_key"])}]  # type: ignore[attr-defined]
    assert domain(key).train_problems() == [{"length": 13}]
    module.load = lambda names, my: [{}, {"url": f"https://h/?k={my['api_key']}"}]  # type: ignore[attr-defined]
    with pytest.raises(DomainError, match=says("`dataset_loader`", "problem 1", "MY_KEY", "recorded")) as refused:
        domain(key).train_problems()
    assert "4711" not in str(refused.value)


def test_cfg_of_domains_has_values_as_they_are_even_if_they_look_like_interpolations() -> None:
    value = "pa${ss}\\${x}\\"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MY_KEY", value)
        cfg = cfg_of_domains({"domain": {"key": {"env": "MY_KEY"}}, "environment": {"env": "maze"}})
    assert (cfg.domain.key, cfg.environment.env) == (value, "maze")
