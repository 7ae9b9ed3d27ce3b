"""Problems of several domains by names with the domain before them: `logic::logic_test`, `coding::taco@train`."""

from collections.abc import Iterable

from my_domains.coding import load_problems as load_coding
from my_domains.counting import load_problems as load_counting
from my_domains.fn_calling import load_problems as load_fn_calling
from my_domains.guessing import load_problems as load_guessing
from my_domains.ifeval import load_problems as load_ifeval
from my_domains.logic import load_problems as load_logic
from my_domains.mathematics import load_datasets as load_math
from my_domains.tir import load_problems as load_tir
from my_domains.web import load_tasks as load_web

LOADERS = {
    "guessing": load_guessing,
    "counting": load_counting,
    "counting_tape": load_counting,
    "math": load_math,
    "coding": load_coding,
    "livecodebench": load_coding,
    "fn_calling": load_fn_calling,
    "logic": load_logic,
    "ifeval": load_ifeval,
    "tir": load_tir,
    "web": load_web,
}


def load_datasets(
    dataset_names: Iterable[str] | None, *, per_domain_params: dict[str, dict] | None = None
) -> list[dict]:
    problems: list[dict] = []
    for entry in dataset_names or []:
        domain, name = entry.split("::", 1)
        name, _, subset = name.partition("@")
        params = dict((per_domain_params or {}).get(domain, {})) | ({"subset": subset} if subset else {})
        problems += [sample | {"domain": domain} for sample in LOADERS[domain]([name], **params)]
    return problems
