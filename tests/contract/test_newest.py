"""`make test-newest`: what it installs, and which library it blames."""

from packaging.requirements import Requirement

from tools.newest import requirements_of, rows_of, without_bounds


def test_requirements_are_those_of_the_project_and_of_the_extras_that_extras_name() -> None:
    project = {
        "dependencies": ["httpx[socks]>=0.28"],
        "optional-dependencies": {"test": ["ruff==1", "pipelinerl[redis]"], "redis": ["redis>=6,<9"], "ray": ["ray"]},
    }
    found = requirements_of(project, ["test"])
    assert [without_bounds(one) for one in found.values()] == ["httpx[socks]", "ruff", "redis"]


def test_table_has_what_moved_what_it_breaks_and_what_a_bound_excludes() -> None:
    wanted = {name: Requirement(text) for name, text in (("a", "a<2"), ("b", "b"), ("c", "c"), ("d", "d<1"))}
    lines = rows_of(
        wanted, {"a": "1", "b": "1", "c": "1"}, {"a": "2", "b": "2", "c": "1", "d": "1"}, {"b": {"t.py::test_x"}}
    )
    assert [line.split(maxsplit=4)[0] for line in lines] == ["a", "b", "t.py::test_x", "d"]
    assert lines[0].endswith("1              -> 2              passes, outside of <2")
    assert lines[1].endswith("breaks 1 test(s)")
    assert lines[3].endswith("not tried, outside of <1")
