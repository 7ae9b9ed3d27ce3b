"""Records runs of one recipe: every evaluation, the training curve, settings, times, machine and commit.

    python -m benchmarks.recipe results/w1 results/w2 --out examples/words --figures examples.words.words:figures

It writes `result.json` and `curve.png`. ``--figures`` names a function of a recipe that adds figures to an evaluation.
``--reference`` is the model before any training: how likely it finds the answers, and how often they repeat words, says
whether they are still English.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.provenance import commit, machine
from pipelinerl.config.load import load_old_run
from pipelinerl.config.paths import newest_export
from pipelinerl.inspect.report import last_per_step, read_records, read_summary
from pipelinerl.inspect.samples import SeenRollout, read_tests
from pipelinerl.observability.catalogue import TrainerMetric
from pipelinerl.records import TrainingSequence
from pipelinerl.records.messages import EvaluationDone, SamplesProcessed
from pipelinerl.streams import set_streams_backend

SHOWN_ANSWERS = 10
TRAINING = (
    TrainerMetric.REWARD,
    TrainerMetric.ENTROPY,
    TrainerMetric.ESS,
    TrainerMetric.KL_K1,
    TrainerMetric.KL_K3,
    TrainerMetric.LAG_MEAN,
    TrainerMetric.LAG_MAX,
    TrainerMetric.TOKENS,
    TrainerMetric.WAIT_S,
)
SECONDS = (TrainerMetric.WAIT_S, TrainerMetric.STEP_S, TrainerMetric.PUSH_WAIT_S)
"""What a step takes of the trainer's time."""
Figures = Callable[[Mapping[str, float]], Mapping[str, float | None]]


def no_figures(means: Mapping[str, float]) -> Mapping[str, float | None]:
    return {}


def named(name: str) -> Figures:
    """``module:function`` as the function."""
    module, _, function = name.partition(":")
    found: Figures = getattr(import_module(module), function)
    return found


def rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def evaluation(seen: EvaluationDone, figures: Figures) -> dict[str, Any]:
    """One evaluation: success, reward and the recipe's figures over all its test problems."""
    means: dict[str, list[float]] = {}
    for name, value in seen.metrics.items():
        if "/" in name:
            means.setdefault(name.partition("/")[2], []).append(value)
    own = figures({name: statistics.fmean(values) for name, values in means.items()})
    return {
        "step": seen.version,
        "problems": seen.num_rollouts,
        "success": rounded(seen.success),
        "reward": rounded(seen.reward),
        **{name: rounded(value) for name, value in own.items()},
    }


def training(steps: Sequence[SamplesProcessed]) -> dict[str, list[Any]]:
    """One list per metric, an entry per optimizer step. ``seconds``: the trainer's, without those between starts."""
    spent = [sum(step.metrics.get(name, 0.0) for name in SECONDS) for step in steps]
    return {
        "seconds": [round(at, 1) for at in accumulate(spent)],
        **{name: [rounded(step.metrics.get(name)) for step in steps] for name in TRAINING},
    }


def repeated_words(text: str) -> float:
    """Share of the words that were there before. Articles and prepositions alone give one of five in long sentences."""
    words = re.findall(r"[a-z'’-]+", text.lower())
    return 1 - len(set(words)) / len(words) if words else 0.0


@torch.inference_mode()
def logprobs_of(reference: PreTrainedModel, sequence: TrainingSequence) -> list[float]:
    """The reference's log-probability of every sampled token, in nats, at temperature 1."""
    ids_1L = torch.as_tensor(sequence.token_ids, dtype=torch.long)[None]
    nats_L = -torch.nn.functional.cross_entropy(
        reference(input_ids=ids_1L).logits[0, :-1].float(), ids_1L[0, 1:], reduction="none"
    )
    return [nat for start, end, _ in sequence.spans.tolist() for nat in nats_L[start - 1 : end - 1].tolist()]


def english(
    tests: Sequence[SeenRollout], version: int, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedModel
) -> dict[str, float]:
    """Repeated words, and the reference's mean log-probability of a token, of all test answers of one version."""
    of_version = [test for test in tests if test.dispatched_version == version]
    nats = [n for test in of_version for sequence in test.rollout.sequences for n in logprobs_of(reference, sequence)]
    return {
        "repeated_words": rounded(statistics.fmean(repeated_words(said(test, tokenizer)) for test in of_version)),
        "reference_nats_per_token": rounded(statistics.fmean(nats)),
    }


def said(test: SeenRollout, tokenizer: PreTrainedTokenizerBase) -> str:
    """What was sampled, without the tokens between the turns."""
    sampled = [
        [token for start, end, _ in sequence.spans.tolist() for token in sequence.token_ids[start:end].tolist()]
        for sequence in test.rollout.sequences
    ]
    return "".join(tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in sampled)


def answers(tests: Sequence[SeenRollout], version: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The first test problems by name, so that they are the same ones before and after, with their answers."""
    of_version = sorted((t for t in tests if t.dispatched_version == version), key=lambda t: t.problem)
    spread = of_version[:: max(1, len(of_version) // SHOWN_ANSWERS)][:SHOWN_ANSWERS]
    return [
        {
            "problem": json.loads(test.problem),
            "answer": said(test, tokenizer),
            "reward": rounded(test.rollout.reward),
        }
        for test in spread
    ]


def record(run_dir: Path, figures: Figures, reference: PreTrainedModel | None = None) -> dict[str, Any]:
    """All that `result.json` says of one run. ``reference`` None: nothing of whether the answers are English."""
    config = load_old_run(run_dir)
    records = read_records(run_dir, with_rollouts=False)
    steps = last_per_step(records.trainer)
    evaluations = sorted({e.version: e for e in records.evaluations}.values(), key=lambda e: e.version)
    tokenizer = AutoTokenizer.from_pretrained(newest_export(run_dir) or config.model_path)
    tests = list(read_tests(run_dir))
    summary = read_summary(run_dir) or {}
    times = [step.timestamp for step in steps]
    ends = {"before": evaluations[0].version, "after": evaluations[-1].version} if evaluations else {}
    return {
        "seed": config.seed,
        "settings": {
            "learning_rate": config.finetune.learning_rate,
            "schedule": config.finetune.lr_scheduler_type,
            "warmup_steps": config.finetune.num_warmup_steps,
            "steps": config.finetune.max_train_steps,
            "batch_rollouts": config.batch_size,
            "attempts": config.attempts,
            "max_lag_steps": config.max_lag_steps,
        },
        "minutes": rounded((times[-1] - times[0]) / 60) if times else None,
        "seconds_per_step": rounded(statistics.median(b - a for a, b in pairwise(times))) if len(times) > 1 else None,
        "summary": {k: rounded(v) for k, v in summary.items() if not isinstance(v, dict | list)},
        "evaluations": [evaluation(e, figures) for e in evaluations],
        "training": training(steps),
        "english": {when: english(tests, at, tokenizer, reference) for when, at in ends.items() if reference},
        **{when: answers(tests, at, tokenizer) for when, at in ends.items()},
    }


def imitation(run_dir: Path) -> dict[str, Any]:
    """Rows, losses and seconds of the imitation that the runs began with."""
    summary = read_summary(run_dir) or {}
    return {"wall_s": rounded(summary["wall_s"]), **{k: rounded(v) for k, v in summary["imitation"].items()}}


def draw(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Every number of the evaluations over optimizer steps, one panel each, one line per seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in runs[0]["evaluations"][0] if name not in ("step", "problems")]
    figure, panels = plt.subplots(1, len(names), figsize=(4 * len(names), 3.2), layout="constrained", squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for run in runs:
            points = [(e["step"], e[name]) for e in run["evaluations"] if e[name] is not None]
            panel.plot(*zip(*points, strict=True), "o-", label=f"seed {run['seed']}")
        panel.set(title=f"{name}, held-out problems", xlabel="optimizer step")
    panels[0][0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, one per seed")
    parser.add_argument("--out", type=Path, required=True, help="folder of the recipe")
    parser.add_argument("--figures", type=named, default=no_figures, help="module:function of a mapping of means")
    parser.add_argument("--imitation", type=Path, help="run folder of the imitation before them")
    parser.add_argument("--reference", help="the model before any training, a folder or a name")
    parser.add_argument("--commit", help="at which the runs were made; else the checkout's")
    parser.add_argument("--note", default="", help="what else the machine did, say")
    args = parser.parse_args()
    set_streams_backend("files")
    reference = AutoModelForCausalLM.from_pretrained(args.reference, dtype=torch.float32) if args.reference else None
    runs = [record(run_dir, args.figures, reference) for run_dir in args.runs]
    document = {
        "machine": machine(),
        "commit": args.commit or commit(),
        "note": args.note,
        **({"imitation": imitation(args.imitation)} if args.imitation else {}),
        "runs": runs,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    draw(args.out / "curve.png", runs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
