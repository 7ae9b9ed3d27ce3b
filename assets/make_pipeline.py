"""Draws assets/pipeline.png: ``python assets/make_pipeline.py``.

Above: the roles and what travels between them. Below: the same in time, every token in the colour of the weight version
that sampled it. Everything is placed by hand on a plane of 12 × 6.9 units.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

WIDTH, HEIGHT = 12.0, 6.9
INK, MUTED, LINE, PAPER = "#1f2933", "#616e7c", "#9aa5b1", "#ffffff"
ACTOR, SERVER, DATA, TRAINER = "#e3eefc", "#dff3ef", "#fdf0d5", "#fbe3dc"
VERSIONS = ("#a9bccf", "#4fa99b", "#f0b429", "#e0674c")

STEPS = ((2.35, 4.35), (4.45, 6.45), (6.55, 8.55), (8.65, 10.65))
"""Begin and end of the optimizer steps in the lower half; a step's end sets the next version live."""
TIMELINE = (1.5, 11.6)
LANES = (
    (2.9, 7.4, 8.9),
    (5.2, 6.1, 9.9),
    (2.6, 3.9, 8.2, 9.3, 10.2),
    (4.1, 5.5, 7.0, 10.9),
)
"""Where one sequence ends and the next begins, per slot of a server."""


def box(axes: Axes, x: float, y: float, width: float, height: float, title: str, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0,rounding_size=0.1", facecolor=colour, edgecolor=LINE, lw=1.1
        )
    )
    axes.text(x + width / 2, y + height - 0.27, title, ha="center", va="center", fontsize=12, weight="bold", color=INK)
    axes.text(
        x + width / 2,
        y + (height - 0.35) / 2,
        text,
        ha="center",
        va="center",
        fontsize=8.6,
        color=MUTED,
        linespacing=1.35,
    )


def arrow(axes: Axes, start: tuple, end: tuple, colour: str = INK, width: float = 1.6, bend: str = "arc3") -> None:
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=13,
            lw=width,
            color=colour,
            connectionstyle=bend,
            shrinkA=0,
            shrinkB=0,
        )
    )


def label(axes: Axes, x: float, y: float, text: str, **style: object) -> None:
    axes.text(
        x, y, text, **{"ha": "center", "va": "center", "fontsize": 8.6, "color": MUTED, "linespacing": 1.3} | style
    )


def draw_roles(axes: Axes) -> None:
    box(axes, 1.5, 3.35, 2.1, 1.05, "actor", "a group of rollouts\nper problem, all at once", ACTOR)
    box(axes, 1.5, 5.55, 2.1, 1.05, "inference servers", "vLLM: sample, never stop\nfor new weights", SERVER)
    box(axes, 5.6, 3.35, 2.1, 1.05, "preprocessor", "advantages, reference KL,\nbalanced packing", DATA)
    box(axes, 9.5, 3.35, 2.1, 1.05, "trainer", "one optimizer step\nafter the other", TRAINER)
    label(axes, 0.55, 3.87, "problems", fontsize=10, color=INK)
    arrow(axes, (1.02, 3.87), (1.45, 3.87))
    arrow(axes, (2.2, 4.45), (2.2, 5.5))
    arrow(axes, (2.9, 5.5), (2.9, 4.45))
    label(axes, 2.1, 4.97, "prompts", ha="right")
    label(axes, 3.0, 4.97, "tokens, log-probs and the\nversion that sampled each", ha="left")
    arrow(axes, (3.65, 3.87), (5.55, 3.87))
    label(axes, 4.6, 4.07, "whole groups")
    label(axes, 4.6, 3.66, "topic actor", style="italic")
    arrow(axes, (7.75, 3.87), (9.45, 3.87))
    label(axes, 8.6, 4.07, "micro-batches")
    label(axes, 8.6, 3.66, "topic training_data", style="italic")
    axes.plot([10.55, 10.55], [4.45, 6.08], color=VERSIONS[3], lw=3, solid_capstyle="round")
    arrow(axes, (10.55, 6.08), (3.66, 6.08), colour=VERSIONS[3], width=3)
    label(axes, 7.1, 6.29, "new weights after every optimizer step, in flight", fontsize=10.5, color=INK, weight="bold")
    label(
        axes, 7.1, 5.83, "staged while decoding goes on, swapped between two decoding steps; requests and KV cache stay"
    )


def draw_timeline(axes: Axes) -> None:
    begin, end = TIMELINE
    bounds = (begin, *(finish for _, finish in STEPS[:3]), end)
    for lane, ends in enumerate(LANES):
        y = 2.3 - 0.3 * lane
        for version, colour in enumerate(VERSIONS):
            axes.add_patch(
                Rectangle((bounds[version], y), bounds[version + 1] - bounds[version], 0.22, facecolor=colour, lw=0)
            )
        for finish in ends:
            axes.add_patch(Rectangle((finish - 0.025, y - 0.01), 0.05, 0.24, facecolor=PAPER, lw=0))
    for step, (start, finish) in enumerate(STEPS):
        colour = VERSIONS[step + 1] if step < 3 else "#d9e2ec"
        axes.add_patch(
            FancyBboxPatch(
                (start, 0.45),
                finish - start,
                0.36,
                boxstyle="round,pad=0,rounding_size=0.06",
                facecolor="none" if step == 3 else colour,
                edgecolor=LINE if step == 3 else "none",
                lw=1.1,
            )
        )
        label(axes, (start + finish) / 2, 0.63, f"optimizer step {step + 1}", fontsize=9, color=INK)
        if step < 3:
            arrow(axes, (finish, 0.83), (finish, 1.36), colour=VERSIONS[step + 1], width=2.6)
    label(axes, begin - 0.12, 1.96, "generation", ha="right", fontsize=10, color=INK, weight="bold")
    label(axes, begin - 0.12, 0.63, "training", ha="right", fontsize=10, color=INK, weight="bold")
    label(axes, (begin + end) / 2, 2.78, "a sequence goes on under the new weights; every token knows its version")
    arrow(axes, (begin, 0.18), (end, 0.18), colour=LINE, width=1.1)
    label(axes, begin - 0.12, 0.18, "time", ha="right")


def main() -> None:
    plt.rcParams["font.family"] = "DejaVu Sans"
    figure = plt.figure(figsize=(WIDTH, HEIGHT), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.axis("off")
    draw_roles(axes)
    axes.plot([0.4, WIDTH - 0.4], [3.07, 3.07], color="#e4e7eb", lw=1)
    draw_timeline(axes)
    figure.savefig(Path(__file__).with_name("pipeline.png"), dpi=130, metadata={"Software": ""})


if __name__ == "__main__":
    main()
