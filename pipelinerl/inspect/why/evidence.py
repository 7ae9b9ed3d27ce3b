"""What is on record about a run, read once for the checks: curves, messages, evaluations, and single attempts."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from pipelinerl.config.load import load_old_run
from pipelinerl.config.paths import newest_export
from pipelinerl.config.sections import Config
from pipelinerl.config.servers import max_model_len
from pipelinerl.errors import ConfigError
from pipelinerl.inspect.balance import Divisions, read_splits
from pipelinerl.inspect.decode import BROKEN, TokenText, load_token_text, problem_fields
from pipelinerl.inspect.drops import read_drops
from pipelinerl.inspect.progress import blocked_places
from pipelinerl.inspect.reading import look_into
from pipelinerl.inspect.report import RunRecords, read_records
from pipelinerl.inspect.samples import PER_STEP, Candidates, SeenRollout, read_tests, read_training
from pipelinerl.inspect.series import Series
from pipelinerl.observability.archive import chosen
from pipelinerl.observability.metrics import Points, read_metrics
from pipelinerl.observability.status import read_statuses
from pipelinerl.records import EvaluationDone, TrainerMessage, TrainingSequence

LONG_TEXT = 16
"""Characters: a shorter text may be missing from the prompt by rewording alone."""
FIRST_TOKENS = 8
"""Tokens of an answer that are compared: further on, two versions rarely share the context."""
PART = 0.2
"""Share of such a text below which a match with the prompt is chance."""
CHECKED_TOKENS = 100
"""Tokens of one span that are decoded to find out whether they are text."""
CHECKED_FOR_TEXT = 200
"""Number of rollouts that are decoded to find out whether the tokenizer fits the model."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What is on record about one training rollout."""

    group: str
    version: int
    """Oldest weight version that sampled a token of it."""
    reward: float
    success: float | None = None
    is_error: bool = False
    """The domain reports an error, although it read an answer."""
    answer: bytes | None = None
    """Digest of all tokens, with those of the prompt and of tools. Equal digests: same answer to the same problem.
    Only in `Evidence.answers`."""
    tokens: int = 1
    """Number of sampled tokens."""
    is_full: bool = False
    """Prompt and answers filled the context."""
    certainty: float = 0.0
    """Mean log-probability of its tokens when they were sampled."""
    asked: float | None = None
    """Share of the problem's text that the prompt holds, 0 for next to nothing. None: the text is not long enough."""
    is_end_trained: bool | None = None
    """Whether the token that ended the answer is trained. None: the answer did not end by itself."""
    goes_on: bool = False
    """Tokens were sampled after the one that ends an answer."""
    advantage: float | None = None
    moved: float | None = None
    """Mean change of its tokens' log-probability from the sampler to the trainer. None: not on record, or no lag."""


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far servers moved from one weight version to another, by equal tokens in equal contexts."""

    first: int
    last: int
    contexts: int
    change: float
    """Mean change of the servers' log-probability in nats."""
    apart: float
    """Mean distance of the trainer from the sampler between the versions, on tokens of the same places in answers."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is on record about a run. `pipelinerl why` alone reads single attempts."""

    cfg: Config
    series: Series = field(default_factory=Series)
    splits: Divisions | None = None
    """Splits of the devices. None: the balance is not checked."""
    messages: Sequence[TrainerMessage] = ()
    evaluations: Sequence[EvaluationDone] = ()
    blocked_at: Mapping[str, str] = field(default_factory=dict)
    """Domain → where it blocked the event loop of a rollout worker last."""
    unreadable_share: float | None = None
    """Share of sampled tokens that the tokenizer does not know or that are broken characters. None = not measured."""
    attempts: Sequence[Attempt] = ()
    """Some of every step, in the order of their versions."""
    answers: Sequence[Attempt] = ()
    """All on record, in the same order, with digest and reward alone."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Reason → groups that the actors gave up."""
    groups: int = 0
    """Groups that the actors published."""
    drifts: Sequence[Drift] = ()
    """Between the evaluated versions, in order."""


@dataclass(frozen=True, kw_only=True)
class RunSource:
    """The records of a run that page and checks share."""

    run_dir: Path
    cfg: Config
    records: RunRecords
    finetune: Points
    actor: Points
    preprocessor: Points

    def points(self, role: str) -> Points:
        return {"finetune": self.finetune, "actor": self.actor, "preprocessor": self.preprocessor}[role]

    def series(self) -> Series:
        return Series(finetune=self.finetune, actor=self.actor, preprocessor=self.preprocessor)


def read_source(run_dir: Path) -> RunSource:
    cfg = load_old_run(run_dir)
    return RunSource(
        run_dir=run_dir,
        cfg=cfg,
        records=read_records(run_dir, replicas=cfg.world.replicas, with_rollouts=False),
        finetune=read_metrics(run_dir, "finetune"),
        actor=read_metrics(run_dir, "actor"),
        preprocessor=read_metrics(run_dir, "preprocessor"),
    )


def evidence_of(source: RunSource) -> Evidence:
    """Everything on record except single attempts."""
    return Evidence(
        cfg=source.cfg,
        series=source.series(),
        splits=read_splits(source.run_dir, source.cfg),
        messages=source.records.trainer,
        evaluations=source.records.evaluations,
        blocked_at=blocked_places(read_statuses(source.run_dir)),
    )


def read_evidence(run_dir: Path) -> Evidence:
    """Read all that is on record. The run's tokenizer is optional: without it no text is compared."""
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
    ends, longest = end_tokens(run_dir, source.cfg.model_path), max_model_len(source.cfg)
    drops = read_drops(run_dir, source.cfg.world.replicas)
    return replace(
        evidence_of(source),
        unreadable_share=None if text is None else unreadable_share(candidates.in_turn(), text),
        attempts=[attempt_of(seen, text, ends, longest) for _, own in sorted(by_step.items()) for seen in _few(own)],
        answers=[answer_of(seen) for _, own in sorted(by_step.items()) for seen in own],
        dropped=drops.groups,
        groups=drops.published_groups,
        drifts=drifts,
    )


def unreadable_share(rollouts: Iterable[SeenRollout], text: TokenText) -> float | None:
    """Share of sampled tokens that the tokenizer does not know or that are broken characters. None without tokens."""
    bad = total = 0
    for seen in islice(rollouts, CHECKED_FOR_TEXT):
        for sequence in seen.rollout.sequences:
            for start, end, _ in sequence.spans.tolist():
                ids = sequence.token_ids[start : min(end, start + CHECKED_TOKENS)].tolist()
                total += len(ids)
                bad += sum(
                    BROKEN in piece or not text.is_known(token)
                    for token, piece in zip(ids, text.pieces(ids), strict=True)
                )
    return bad / total if total else None


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
    """The tokens that end an answer, from the model's files. Empty if there are none."""
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
    """The attempt with all that the checks use. ``longest``: tokens of a context. None: unknown."""
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
        tokens=seen.rollout.num_sampled,
        is_full=any(is_full(sequence, longest) for sequence in rollout.sequences),
        certainty=float(sampled.mean()) if len(sampled) else 0.0,
        asked=None if text is None else share_asked(seen.problem, prompt_of(rollout.sequences[0], text)),
        is_end_trained=bool(last.spans[-1, 1] == len(last.token_ids)) if is_stopped else None,
        goes_on=any(goes_on(sequence, ends) for sequence in rollout.sequences),
        advantage=seen.advantage,
        moved=moved(seen) if seen.lag else None,
    )


def answer_of(seen: SeenRollout) -> Attempt:
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

    0: the prompt holds next to nothing of any. None: no text is long enough.
    """
    known = " ".join(prompt.split())
    texts = [" ".join(value.split()) for value in problem_fields(problem).values() if isinstance(value, str)]
    shares = [_share(one, known) for one in texts if len(one) >= LONG_TEXT]
    if not shares:
        return None
    best = max(shares)
    return best if best >= PART else 0.0


def _share(text: str, known: str) -> float:
    """Bisection: if a part is in the prompt, so is every beginning of it."""
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
