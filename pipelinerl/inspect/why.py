"""`pipelinerl why RUN`: what keeps a run from learning, the likeliest cause first.

    pipelinerl why results/x               every cause with its evidence, the command that shows it, and what to do
    pipelinerl why results/x --json        the same as one JSON list

Reads the folder of a running or ended run and changes nothing in it. It exits with 1 if it found a cause, else with 0.
`inspect.causes` has the checks, this module what they read.
"""

import hashlib
import json
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config.paths import newest_export
from pipelinerl.config.servers import max_model_len
from pipelinerl.errors import ConfigError, told_in_one_line, visible
from pipelinerl.inspect.causes import Attempt, Cause, Drift, Evidence, Level, causes
from pipelinerl.inspect.decode import TokenText, load_token_text, problem_fields
from pipelinerl.inspect.ending import ending_alarms, read_ending
from pipelinerl.inspect.page.browser import Candidates
from pipelinerl.inspect.page.build import history_of, measure_unreadable
from pipelinerl.inspect.page.data import read_source
from pipelinerl.inspect.reading import command_parser, look_into
from pipelinerl.inspect.samples import SeenRollout, read_tests, read_training
from pipelinerl.observability.archive import chosen
from pipelinerl.observability.catalogue import ActorMetric
from pipelinerl.records import TrainingSequence

PER_STEP = 16
"""Attempts of an optimizer step that are looked at, with the attempts at one problem together."""
LONG_TEXT = 16
"""Characters of a problem's text from which its absence from the prompt means something."""
FIRST_TOKENS = 8
"""Tokens of an answer that may stand in the same context under two versions."""
PART = 0.2
"""Share of such a text that is no accident."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code. `argv` = None takes the process's arguments."""
    parser = command_parser("why", __doc__)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--json", action="store_true", help="one JSON list")
    arguments = parser.parse_args(argv)
    evidence = read_evidence(arguments.run)
    found = [*ended(arguments.run), *causes(evidence)]
    if arguments.json:
        print(json.dumps([as_data(cause, arguments.run) for cause in found], indent=2))
    else:
        print(visible("\n".join(lines(found, arguments.run, len(evidence.attempts)))))
    return int(bool(found))


def ended(run_dir: Path) -> list[Cause]:
    """The cause of a run that failed."""
    failure = ending_alarms(read_ending(run_dir))
    return [Cause(**vars(alarm), level=Level.DELIVERY, command="pipelinerl status {run}") for alarm in failure]


def lines(found: Sequence[Cause], run_dir: Path, attempts: int) -> list[str]:
    if not found:
        return [f"nothing looks wrong in {run_dir}: its metrics and {attempts} of its attempts were looked at"]
    text = []
    for number, cause in enumerate(found, 1):
        since = "" if cause.step is None else f" since step {cause.step}"
        text += [f"{number}. {cause.name}{since}: {cause.text}", f"   look: {command_of(cause, run_dir)}"]
        text += [f"   do:   {cause.cure}"]
    return text


def command_of(cause: Cause, run_dir: Path) -> str:
    command = cause.command.replace("{step}", str(cause.step or 0))  # no format: a group's name may have braces
    return command.replace("{run}", shlex.quote(str(run_dir)))


def as_data(cause: Cause, run_dir: Path) -> dict[str, Any]:
    return vars(cause) | {"level": cause.level.name.lower(), "command": command_of(cause, run_dir)}


def read_evidence(run_dir: Path) -> Evidence:
    """Read what is on record about a run. Its tokenizer is optional: without it no text is compared."""
    with look_into(run_dir):
        source = read_source(run_dir)
        by_step: dict[int, list[SeenRollout]] = defaultdict(list)
        candidates = Candidates()
        for seen in read_training(run_dir, replicas=source.cfg.world.replicas):
            candidates.add([seen])
            if seen.rollout.sequences:
                by_step[seen.versions[0] if seen.versions else 0].append(seen)
        trained = (seen for own in by_step.values() for seen in own)
        drifts = drifts_of(read_tests(run_dir, replicas=source.cfg.world.replicas), trained)
    try:
        text: TokenText | None = load_token_text(run_dir)
    except ConfigError:
        text = None
    unreadable = None if text is None else measure_unreadable(candidates, text)
    ends, longest = end_tokens(run_dir, source.cfg.model_path), max_model_len(source.cfg)
    newest = source.actor[-1] if source.actor else {}
    return Evidence(
        history=history_of(source, unreadable),
        attempts=[attempt_of(seen, text, ends, longest) for _, own in sorted(by_step.items()) for seen in _few(own)],
        answers=[answer_of(seen) for _, own in sorted(by_step.items()) for seen in own],
        dropped={reason: int(count) for reason, count in ActorMetric.GROUPS_DROPPED.found(newest).items()},
        groups=int(newest.get(ActorMetric.GROUPS) or 0),
        drifts=drifts,
    )


def drifts_of(evaluated: Iterable[SeenRollout], trained: Iterable[SeenRollout]) -> list[Drift]:
    """How far the first tokens of equal problems moved between the evaluated versions, and how far the trainer is."""
    known: dict[int, dict[bytes, tuple[int, float]]] = defaultdict(dict)
    for seen in evaluated:
        sequence = seen.rollout.sequences[0] if seen.rollout.sequences else None
        if sequence is None or not len(sequence.spans) or len(seen.versions) != 1:
            continue
        begin, end = sequence.spans[0, :2].tolist()
        for place in range(min(end - begin, FIRST_TOKENS)):
            context = sequence.token_ids[: begin + place + 1].tobytes()
            known[seen.versions[0]][context] = place, float(sequence.logprobs[place])
    apart: dict[int, list[list[float]]] = defaultdict(lambda: [[] for _ in range(FIRST_TOKENS)])
    for seen in trained:
        if seen.step is not None and seen.lag and (changes := changes_of(seen)) is not None:
            for place, distance in enumerate(np.abs(changes[:FIRST_TOKENS]).tolist()):
                apart[seen.step][place].append(distance)
    return [
        drift
        for before, after in pairwise(sorted(known))
        if (drift := _drift(known, before, after, [own for step, own in apart.items() if before < step <= after]))
    ]


def _drift(
    known: Mapping[int, Mapping[bytes, tuple[int, float]]],
    before: int,
    after: int,
    apart: Sequence[Sequence[Sequence[float]]],
) -> Drift | None:
    """``apart``: of each step, by place in the answer, the distances of the trainer from the sampler."""
    at_place = [[distance for step in apart for distance in step[place]] for place in range(FIRST_TOKENS)]
    shared = known[before].keys() & known[after].keys()
    pairs = [
        (abs(known[after][context][1] - known[before][context][1]), float(np.mean(others)))
        for context in shared
        if (others := at_place[known[after][context][0]])
    ]
    if not pairs:
        return None
    change, distance = np.mean(pairs, axis=0).tolist()
    return Drift(first=before, last=after, contexts=len(pairs), change=change, apart=distance)


def _few(rollouts: Sequence[SeenRollout]) -> Iterator[SeenRollout]:
    keep = chosen((seen.sample_id for seen in rollouts), PER_STEP)
    yield from (seen for seen in rollouts if seen.sample_id in keep)


def end_tokens(run_dir: Path, model_path: str) -> frozenset[int]:
    """The tokens that end an answer, as the model's own files say. Empty if none of them is here."""
    for folder in filter(None, (newest_export(run_dir), Path(model_path), run_dir / "model")):
        for name in ("generation_config.json", "config.json"):
            try:
                found = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
            except (OSError, ValueError):
                continue
            if found is not None:
                return frozenset(found if isinstance(found, list) else [found])
    return frozenset()


def attempt_of(seen: SeenRollout, text: TokenText | None, ends: frozenset[int], longest: int | None) -> Attempt:
    """What is on record. ``longest``: tokens of a context, None if it is not known."""
    rollout = seen.rollout
    last, metrics = rollout.sequences[-1], rollout.metrics
    sampled = np.concatenate([sequence.logprobs for sequence in rollout.sequences])
    is_stopped = last.finish_reason == "stop" and len(last.spans) > 0
    return Attempt(
        group=seen.group_id,
        version=seen.versions[0] if seen.versions else seen.dispatched_version,
        reward=rollout.reward,
        success=metrics.get("success"),
        is_error=not metrics.get("no_error", 1.0) and not metrics.get("no_answer", 1.0),
        tokens=seen.num_sampled,
        is_cut=any(sequence.finish_reason == "length" for sequence in rollout.sequences),
        is_full=any(is_full(sequence, longest) for sequence in rollout.sequences),
        certainty=float(sampled.mean()) if len(sampled) else 0.0,
        asked=None if text is None else share_asked(seen.problem, prompt_of(rollout.sequences[0], text)),
        is_end_trained=bool(last.spans[-1, 1] == len(last.token_ids)) if is_stopped else None,
        goes_on=any(goes_on(sequence, ends) for sequence in rollout.sequences),
        advantage=seen.advantage,
        moved=moved(seen) if seen.lag else None,
    )


def answer_of(seen: SeenRollout) -> Attempt:
    """What it said and earned."""
    digest = hashlib.blake2b(digest_size=16)
    for sequence in seen.rollout.sequences:
        digest.update(sequence.token_ids.tobytes())
    return Attempt(
        group=seen.group_id,
        version=seen.versions[0] if seen.versions else seen.dispatched_version,
        reward=seen.rollout.reward,
        success=seen.rollout.metrics.get("success"),
        answer=digest.digest(),
    )


def prompt_of(sequence: TrainingSequence, text: TokenText) -> str:
    """Everything before the first sampled token."""
    end = int(sequence.spans[0, 0]) if len(sequence.spans) else len(sequence.token_ids)
    return text.text(sequence.token_ids[:end].tolist())


def share_asked(problem: str, prompt: str) -> float | None:
    """The largest share of one of the problem's texts that the prompt holds, from its beginning or to its end.

    0: the prompt holds next to nothing of any, as when a template words it anew. None: no text is long enough.
    """
    known = " ".join(prompt.split())
    texts = [" ".join(value.split()) for value in problem_fields(problem).values() if isinstance(value, str)]
    shares = [_share(one, known) for one in texts if len(one) >= LONG_TEXT]
    if not shares:
        return None
    best = max(shares)
    return best if best >= PART else 0.0


def _share(text: str, known: str) -> float:
    """Bisection: every beginning of a part that is there is there, too."""
    longest = 0
    for part in (lambda n: text[:n], lambda n: text[len(text) - n :]):
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if part(middle) in known else (low, middle - 1)
        longest = max(longest, low)
    return longest / len(text)


def is_full(sequence: TrainingSequence, longest: int | None) -> bool:
    """Whether the end of a context of ``longest`` tokens ended an answer."""
    return longest is not None and sequence.finish_reason == "length" and len(sequence.token_ids) >= longest


def goes_on(sequence: TrainingSequence, ends: Iterable[int]) -> bool:
    """Whether a token of ``ends`` was sampled inside a completion, which is a run of adjacent spans."""
    inner = np.isin(sequence.token_ids, list(ends))
    starts, stops = sequence.spans[:, 0], sequence.spans[:, 1]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        is_last = stop not in starts
        if inner[start : stop - is_last].any():
            return True
    return False


def moved(seen: SeenRollout) -> float | None:
    """Mean change of the tokens' log-probability from the sampler to the trainer."""
    changes = changes_of(seen)
    return None if changes is None else float(changes.mean())


def changes_of(seen: SeenRollout) -> np.ndarray | None:
    """float32 [K]: trainer's less sampler's log-probability of every sampled token. None: not on record."""
    changes = [
        score.logprobs - sequence.logprobs
        for score, sequence in zip(seen.scores, seen.rollout.sequences, strict=False)
        if score is not None and len(score.logprobs) == len(sequence.logprobs)
    ]
    return np.concatenate(changes) if changes else None


if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
