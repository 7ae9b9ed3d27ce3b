"""The model card beside every export: what the model was made from, with which settings, and what it reached."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipelinerl.config.keys import declared
from pipelinerl.config.nested import value_at
from pipelinerl.config.paths import exports
from pipelinerl.config.sections import Config
from pipelinerl.config.versions import installed_versions
from pipelinerl.records.messages import EvaluationDone
from pipelinerl.world.disk import replace_file

OF_THE_MACHINE = ("world", "launcher", "streams", "wandb", "tracing", "output_dir", "debug")
"""Sections that say how the run was executed, not what was learned."""
CARD = """\
---
base_model: {base}
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, pipelinerl]
---

# {base}, {step} optimizer steps of PipelineRL

{curve}

The settings beside the defaults, for `pipelinerl launch --config-name=FILE`:

```yaml
defaults: [base, _self_]
{settings}```

Made with {versions}.
"""


def write_cards(run_dir: Path, cfg: Config, evaluations: Sequence[EvaluationDone]) -> None:
    """Write `README.md` into every exported model of a run."""
    versions = installed_versions()
    for step, folder in exports(run_dir).items():
        replace_file(folder / "README.md", card(cfg, step, evaluations, versions))


def card(cfg: Config, step: int, evaluations: Sequence[EvaluationDone], versions: Mapping[str, str]) -> str:
    """The card of the model of one step, with the evaluations up to it."""
    rows = [
        f"| {done.version} | {done.success:.3f} | {done.reward:.3f} | {done.num_rollouts} |"
        for done in sorted(evaluations, key=lambda done: done.version)
        if done.version <= step and done.success is not None and done.reward is not None
    ]
    head = ["| step | success | reward | rollouts |", "|---|---|---|---|"]
    return CARD.format(
        base=Path(cfg.model_path).name if Path(cfg.model_path).is_absolute() else cfg.model_path,
        step=step,
        curve="\n".join([*head, *rows]) if rows else "It was not evaluated on test problems.",
        settings=yaml.safe_dump(other_settings(cfg), sort_keys=False, allow_unicode=True),
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
    )


def other_settings(cfg: Config) -> dict[str, Any]:
    """The keys, nested, whose value is not the default and not taken from another key."""
    container = cfg.model_dump(mode="json")
    found: dict[str, Any] = {}
    for key in declared(Config):
        value = value_at(container, key.name)
        is_copied = isinstance(key.default, str) and "${" in key.default
        if key.name.partition(".")[0] in OF_THE_MACHINE or is_copied or value == key.default:
            continue
        *sections, last = key.name.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return found
