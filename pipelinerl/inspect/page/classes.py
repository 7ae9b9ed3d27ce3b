"""Charts of the report that part attempts into classes: success by difficulty and by length. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipelinerl.records import EvaluationDone

BUCKETS = 20
"""Points of a line."""
FEWEST = 8
"""Attempts behind a point."""
NEVER, SOMETIMES, ALWAYS = "never solved at first", "sometimes", "always solved at first"


def by_difficulty(evaluations: Sequence[EvaluationDone]) -> list[dict[str, Any]]:
    """Success on test problems by how the first evaluated weights did on each. Empty without two evaluations."""
    done = sorted((one for one in evaluations if one.outcomes), key=lambda one: one.version)
    if len(done) < 2:
        return []
    first = _problems(done[0])
    # With one attempt at each problem luck decides about the classes, too.
    classes = {place: _class_of(*outcome) for place, outcome in first.items() if outcome[0]}
    lines = []
    for label in (NEVER, SOMETIMES, ALWAYS):
        xs, ys = [], []
        for one in done:
            own = [outcome for place, outcome in _problems(one).items() if classes.get(place) == label]
            attempts, solved = (sum(values) for values in zip(*own, strict=True)) if own else (0, 0)
            if attempts:
                xs.append(one.version)
                ys.append(round(solved / attempts, 4))
        if xs:
            lines.append({"label": label, "x": xs, "y": ys})
    return [{"title": "Success by difficulty", "unit": "of test problems", "lines": lines}] if lines else []


def _problems(done: EvaluationDone) -> dict[tuple[str, int], tuple[int, int]]:
    """(data set, index) → (attempts with a result, successes)."""
    return {(name, i): outcome for name, outcomes in done.outcomes.items() for i, outcome in enumerate(outcomes)}


def _class_of(attempts: int, solved: int) -> str:
    return ALWAYS if solved == attempts else SOMETIMES if solved else NEVER


def by_length(attempts: Iterable[tuple[int, int, bool]]) -> list[dict[str, Any]]:
    """Success in training by thirds of all attempts' lengths. Empty where all are about as long.

    ``attempts``: (optimizer step, sampled tokens, success) of each.
    """
    known = np.array(list(attempts), np.int64).reshape(-1, 3)
    if len(known) < FEWEST:
        return []
    steps, tokens, success = known.T
    low, high = np.quantile(tokens, [1 / 3, 2 / 3], method="lower").tolist()
    parts = [(f"up to {low} tokens", tokens <= low), (f"more than {high} tokens", tokens > high)]
    if high > low:
        parts.insert(1, (f"{low + 1} … {high} tokens", (tokens > low) & (tokens <= high)))
    width = max(1, -(-(int(steps.max()) + 1) // BUCKETS))
    lines = []
    for label, chosen in parts:
        buckets: dict[int, list[int]] = defaultdict(list)
        for step, solved in zip(steps[chosen].tolist(), success[chosen].tolist(), strict=True):
            buckets[step // width].append(solved)
        points = {place * width + width // 2: values for place, values in sorted(buckets.items())}
        enough = {x: round(sum(values) / len(values), 4) for x, values in points.items() if len(values) >= FEWEST}
        if enough:
            lines.append({"label": label, "x": list(enough), "y": list(enough.values())})
    return [{"title": "Success by length", "unit": "of training attempts", "lines": lines}] if len(lines) > 1 else []
