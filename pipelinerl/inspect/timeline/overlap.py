"""How much of a run generation and training went on at the same time: as figures, and as a picture."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.inspect.timeline.reading import TimelineSpan

Interval = tuple[float, float]
COLOURS = {
    "training": "#4477aa",
    "evaluation": "#88ccee",
    "step": "#cc6677",
    "wait": "#dddddd",
    "snapshot": "#882255",
    "transfer": "#ddcc77",
    "swap": "#000000",
    "pack": "#117733",
}


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds."""

    training: float
    """In which an optimizer step was computed."""
    generating: float
    """In which at least one request for a completion was under way."""
    both: float
    paused: float
    """In which a server stood still for a swap of weights, summed over the servers."""

    @property
    def text(self) -> str:
        share = self.both / self.training if self.training else 0.0
        return (
            f"training {self.training:.1f} s, generating {self.generating:.1f} s: completions were under way in "
            f"{share:.1%} of the time in which a step was computed; servers paused {self.paused:.2f} s in all"
        )


def overlap(spans: Sequence[TimelineSpan]) -> Overlap:
    """Measure the overlap in a run's spans."""
    training, generating = union(named(spans, "step")), union(named(spans, "llm call"))
    return Overlap(
        training=total(training),
        generating=total(generating),
        both=total(intersection(training, generating)),
        paused=sum(end - start for start, end in named(spans, "swap")),
    )


def named(spans: Iterable[TimelineSpan], name: str) -> list[Interval]:
    return [(span.start, span.end) for span in spans if span.name == name]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times as intervals that do not touch, ascending."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def intersection(left: Sequence[Interval], right: Sequence[Interval]) -> list[Interval]:
    """The times that are in both. Each argument as from ``union``."""
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def under_way(intervals: Iterable[Interval]) -> tuple[list[float], list[int]]:
    """(times, number of intervals under way from each time on)."""
    changes = sorted(change for start, end in intervals for change in ((start, 1), (end, -1)))
    times, counts, count = [], [], 0
    for time, change in changes:
        count += change
        times.append(time)
        counts.append(count)
    return times, counts


def draw(spans: Sequence[TimelineSpan], path: Path) -> None:
    """Draw generation, packing, training and weight updates on one axis of time."""
    from matplotlib.figure import Figure

    tests = {span.trace for span in spans if span.name == "rollout" and span.attributes.get("evaluation")}
    calls = [span for span in spans if span.name == "llm call"]
    servers = sorted({str(span.attributes["server"]) for span in spans if "server" in span.attributes})
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1 + 0.6 * len(servers)))
    for kind in ("training", "evaluation"):
        mine = [(call.start, call.end) for call in calls if (call.trace in tests) == (kind == "evaluation")]
        times, counts = under_way(mine)
        label = "completions for training" if kind == "training" else "completions of evaluations"
        upper.fill_between(times, counts, step="post", color=COLOURS[kind], alpha=0.85, linewidth=0, label=label)
    upper.set_ylabel("under way")
    upper.set_ylim(bottom=0)
    upper.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, fontsize=8)
    rows = ["trainer", "preprocessor", *servers]
    for name, row in {"wait": 0, "step": 0, "snapshot": 0, "pack": 1}.items():
        _bars(lower, named(spans, name), row, name)
    for name in ("transfer", "swap"):
        for place, server in enumerate(servers):
            mine = [(s.start, s.end) for s in spans if s.name == name and s.attributes.get("server") == server]
            _bars(lower, mine, 2 + place, name if not place else None, COLOURS[name])
    lower.set_yticks(range(len(rows)), rows)
    lower.invert_yaxis()
    lower.set_xlabel("seconds")
    lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=6, frameon=False, fontsize=8)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(overlap(spans).text, fontsize=8)
    figure.savefig(path, dpi=150)


def _bars(axes, intervals: Sequence[Interval], row: int, label: str | None, colour: str | None = None) -> None:
    bars = [(start, end - start) for start, end in intervals]
    axes.broken_barh(bars, (row - 0.4, 0.8), color=colour or COLOURS[str(label)], label=label, linewidth=0)
