"""Loads data sets by names such as `math::math_500` and `coding::taco@train`, for PipelineRL's multi-domain dispatcher.

A domain's share of the training is its share of the problems. To mix domains by weight, use `domains`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pipelinerl.config.dotted import resolve_function
from pipelinerl.domains.datasets import Problem
from pipelinerl.errors import DomainError

LOADERS = {
    "math": "pipelinerl.domains.math.load_problems",
    "guessing": "pipelinerl.domains.pipelinerl_games.guessing.load_problems",
    "counting": "pipelinerl.domains.pipelinerl_games.counting.load_problems",
}
"""PipelineRL's domains whose data sets are the same here."""
SUBSETS = ("train", "test", "all")


def load_datasets(
    dataset_names: Iterable[str] | str | None,
    *,
    seed: int | None = None,
    per_domain_params: Mapping[str, Mapping[str, Any]] | None = None,
    loaders: Mapping[str, str] | None = None,
    **params: Any,
) -> list[Problem]:
    """Loads the data sets of several domains. Every problem names its domain.

    A problem that does not name its data set gets the names of all data sets that its loader was called with.

    Args:
        dataset_names: `<domain>::<data set>` each, with `@train`, `@test` or `@all` for loaders with a ``subset``.
        seed: passed to every loader, if given.
        per_domain_params: arguments of the loader by domain.
        loaders: dotted names of loaders by domain. They take precedence over `LOADERS`.
        **params: arguments of every loader.
    Raises:
        DomainError: a name has no domain, or its domain has no loader.
    """
    names = [dataset_names] if isinstance(dataset_names, str) else list(dataset_names or [])
    wanted: dict[tuple[str, str | None], list[str]] = {}
    for entry in names:
        domain, name, subset = parse_name(entry)
        wanted.setdefault((domain, subset), []).append(name)
    known = {**LOADERS, **(loaders or {})}
    problems: list[Problem] = []
    for (domain, subset), datasets in wanted.items():
        if domain not in known:
            raise DomainError(
                f"no loader for the domain {domain!r} of {domain}::{datasets[0]}: name one in "
                f"`dataset_loader_params.loaders.{domain}`; there are {sorted(known)}"
            )
        given = {**params, **(per_domain_params or {}).get(domain, {})}
        given |= {} if seed is None else {"seed": seed}
        given |= {} if subset is None else {"subset": subset}
        for problem in resolve_function(known[domain])(datasets, **given):
            problems.append({"domain": domain, "dataset": " + ".join(datasets), **problem})
    return problems


def parse_name(entry: str) -> tuple[str, str, str | None]:
    """Returns domain, data set and subset of `<domain>::<data set>[@subset]`.

    Raises:
        DomainError: the name has no domain.
    """
    domain, separator, name = entry.partition("::")
    if not separator or not domain.strip():
        raise DomainError(f"the data set {entry!r} has no domain: write it as `<domain>::<data set>`")
    dataset, at, subset = name.rpartition("@")
    if at and subset.strip() in SUBSETS:
        return domain.strip(), dataset.strip(), subset.strip()
    return domain.strip(), name.strip(), None
