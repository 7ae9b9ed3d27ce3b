"""One rank of a replay: trains from the folder's checkpoint to its step, then computes the step once per objective.

    python -m pipelinerl.inspect.replay.rank FOLDER '{"policy_loss": "ppo"}' false

It calls the trainer's own functions in the trainer's order, so on a CPU the figures are the trainer's bit for bit.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipelinerl.config.load import load_old_run
from pipelinerl.config.sections import Config
from pipelinerl.errors import CheckpointError, ConfigError
from pipelinerl.finetune.accumulate import BatchRules, prepare_batch, train_step
from pipelinerl.finetune.batch_reader import BatchReader
from pipelinerl.finetune.build import make_engine, make_rules
from pipelinerl.finetune.checkpoints import checkpoint_root
from pipelinerl.finetune.data import index_tokens
from pipelinerl.finetune.engines import Engine, read_ranks
from pipelinerl.finetune.learning_rate import learning_rate
from pipelinerl.finetune.model import PolicyOutput
from pipelinerl.finetune.proximal import ProximalPolicy
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.finetune.rl.objective import LossSettings, settings_at, token_losses
from pipelinerl.finetune.saving import load_newest, read_proximal
from pipelinerl.inspect.replay import folder as files
from pipelinerl.inspect.replay.folder import ReplayedSequence, ReplayedStep, ReplayPlan, StepBatches
from pipelinerl.observability.catalogue import MetricName, as_texts
from pipelinerl.records import MicroBatch

OWN, OTHER = "own", "other"
"""Names of the results: of the run's own objective, and of the changed one."""


class StepFiles:
    """The micro-batches of a replay folder as a topic, one step per poll. Offsets are step numbers."""

    def __init__(self, folder: Path, rank: int, plan: ReplayPlan):
        self._folder, self._rank, self._last = folder, rank, plan.last
        self.position = plan.first

    def poll(self, timeout_s: float) -> Sequence[tuple[int, MicroBatch]]:
        if self.position > self._last:
            return []
        step, self.position = self.position, self.position + 1
        found = files.read_record(files.batch_file(self._folder, self._rank, step), StepBatches)
        return [(step, record) for record in found.records]

    def commit(self, offset: int) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class TokenFigures:
    """Collects the figures of every trained token while a step is trained."""

    settings: LossSettings
    rules: BatchRules
    of_versions: Sequence[Tensor] | None = None
    """[K] log π_v of each record, as `ReplayedSequence.version_logprobs`."""
    sequences: list[ReplayedSequence] = field(default_factory=list)
    _count: int = 0

    def add(self, record: MicroBatch, output: PolicyOutput, altered_K: Tensor) -> None:
        """Add a micro-batch, as `accumulate.Observer`."""
        number, self._count = self._count, self._count + 1
        if self.rules.sequence is not None:
            return
        inputs = output.inputs
        logprobs_K = output.logprobs_K.detach().requires_grad_()
        with torch.enable_grad():
            losses_K = inputs.weights_K * token_losses(logprobs_K, output.entropy_K.detach(), inputs, self.settings)
            (slopes_K,) = torch.autograd.grad(losses_K.sum(), logprobs_K)
        unknown_K = torch.full_like(output.logprobs_K, torch.nan)
        columns = {
            "logprobs": logprobs_K,
            "version_logprobs": unknown_K if self.of_versions is None else self.of_versions[number],
            "entropy": output.entropy_K,
            "advantages": inputs.advantages_K,
            "altered": altered_K,
            "losses": losses_K,
            "slopes": slopes_K,
        }
        arrays = {name: _numbers(tensor) for name, tensor in columns.items()}
        self.sequences += sequences_of(record, arrays)


def _numbers(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return tensor.numpy() if tensor.dtype == torch.bool else tensor.float().numpy()


def sequences_of(record: MicroBatch, arrays: Mapping[str, np.ndarray]) -> list[ReplayedSequence]:
    """The sequences of a micro-batch that have trained tokens. ``arrays``: [K] figures by field."""
    index = index_tokens(record)
    starts = np.cumsum(record.segment_lengths) - record.segment_lengths
    found = []
    for segment in np.unique(index.segments_K):
        mine = index.segments_K == segment
        at = index.positions_K[mine]
        found.append(
            ReplayedSequence(
                sequence_id=record.sequence_ids[segment],
                token_ids=record.token_ids[at].astype(np.int32),
                positions=(at - starts[segment]).astype(np.int32),
                versions=index.versions_K[mine].astype(np.int32),
                sampler_logprobs=record.logprobs[at],
                **{name: values[mine] for name, values in arrays.items()},
            )
        )
    return found


def replay(folder: Path, changes: Mapping[str, Any], *, mismatch: bool = False) -> None:
    """Compute the folder's step on this rank and write the results. Collective.

    Args:
        changes: for a second computation of the step, as `changed_settings`. Empty: there is none.
        mismatch: also compute the log-probabilities of the weights that sampled the tokens.
    """
    plan = files.read_record(folder / files.PLAN, ReplayPlan)
    cfg = load_old_run(plan.run_dir)
    other = files.changed_settings(cfg, changes)
    accelerator = "cuda" if plan.accelerator == "cuda" and torch.cuda.is_available() else "cpu"
    if accelerator == "cpu":
        torch.set_num_threads(plan.threads)
    rank, world_size, device = read_ranks(accelerator)
    torch.manual_seed(cfg.seed + rank)
    engine = make_engine(cfg, device, world_size)
    try:
        peers, left_of_block = Peers(rank, world_size), None
        if plan.first and load_newest(engine, peers, checkpoint_root(folder)) is None:
            raise CheckpointError(f"the checkpoint of step {plan.first} is damaged, so nothing can be replayed from it")
        if plan.restores_proximal:
            left_of_block = read_proximal(peers, checkpoint_root(folder) / f"step_{plan.first}")
        ahead = files.read_record(files.batch_file(folder, rank, plan.step), StepBatches) if mismatch else None
        run = _Run(cfg, engine, BatchReader([("0", StepFiles(folder, rank, plan))]), ahead, left_of_block)
        for step in range(plan.first, plan.step):
            run.score_version(step)
            run.train(step, {})
        run.score_version(plan.step)
        state = run.state() if other else None
        own, change = run.measure(plan.step, {}, None)
        files.write_record(files.result_file(folder, OWN, rank), own)
        if state is not None:
            run.restore(state, plan.step)
            found, _ = run.measure(plan.step, other, change)
            files.write_record(files.result_file(folder, OTHER, rank), found)
    finally:
        engine.close()


Tensors = dict[str, Tensor]


class _Run:
    """The trainer's computations on one rank, without its outputs."""

    def __init__(
        self, cfg: Config, engine: Engine, feed: BatchReader, ahead: StepBatches | None, left_of_block: bytes | None
    ):
        """``ahead``: micro-batches to score with the weights that sampled their tokens. None: there are none.

        ``left_of_block``: the checkpoint's `ProximalPolicy.state`.
        """
        self._cfg, self._engine, self._feed = cfg, engine, feed
        self._rules = make_rules(engine, cfg)
        self._step = ahead.records[0].step if ahead is not None else None
        self._ahead = () if ahead is None or self._rules.sequence is not None else ahead.records
        self._of_versions = [torch.full(index_tokens(r).positions_K.shape, torch.nan) for r in self._ahead] or None
        self._proximal = ProximalPolicy(cfg.proximal_steps, cfg.finetune.max_train_steps)
        if left_of_block is not None:
            self._proximal.restore(left_of_block, engine.device)
        self._read: tuple[int, list[MicroBatch], list[Tensor] | None] | None = None

    def train(self, step: int, changes: Mapping[str, Any]) -> tuple[dict[MetricName, float], TokenFigures]:
        """Train one step, a second time if it is the last one that was trained, with changed settings of the loss."""
        records, proximal = self._inputs(step)
        of_loss = dict(changes)
        rules = replace(self._rules, share_prefixes=of_loss.pop(files.SHARE_PREFIXES, self._rules.share_prefixes))
        settings = replace(settings_at(self._cfg, step), **of_loss)
        if settings.kl_coef and records[0].ref_logprobs is None:
            raise ConfigError(
                "--with kl_coef=…: the run has no reference model, whose log-probabilities a KL term needs"
            )
        figures = TokenFigures(settings, rules, self._of_versions if step == self._step else None)
        rate = learning_rate(self._cfg.finetune, step)
        metrics = train_step(self._engine, records, settings, rules, rate, proximal, figures.add)
        return metrics, figures

    def measure(self, step: int, changes: Mapping[str, Any], reference: Tensors | None) -> tuple[ReplayedStep, Tensors]:
        """Train ``step`` and return its figures and the change of the parameters that this rank saves.

        Args:
            changes: as in ``train``.
            reference: another change, with which this one is compared. None: with itself.
        """
        before = _copy(self._parameters())
        metrics, figures = self.train(step, changes)
        change = {name: tensor.double() - before[name].double() for name, tensor in self._parameters().items()}
        other = change if reference is None else reference
        norm, other_norm = self._product(change, change) ** 0.5, self._product(other, other) ** 0.5
        cosine = self._product(change, other) / (norm * other_norm) if norm and other_norm else 0.0
        found = ReplayedStep(
            metrics=as_texts(metrics),
            sequences=tuple(figures.sequences),
            update_norm=norm,
            update_cosine=cosine,
            proximal_made_at=self._proximal.made_at,
        )
        return found, change

    def score_version(self, version: int) -> None:
        """Score the tokens that ``version``, the present one, sampled. Collective."""
        for record, found_K in zip(self._ahead, self._of_versions or (), strict=True):
            mine_K = torch.from_numpy(index_tokens(record).versions_K == version)
            scored_K = self._engine.evaluate(prepare_batch(record, self._rules, self._engine.device)).float().cpu()
            found_K[mine_K] = scored_K[mine_K]

    def state(self) -> Tensors:
        """A copy of the training state."""
        return _copy({name: piece.tensor for name, piece in self._engine.pieces().items()})

    def restore(self, state: Tensors, step: int) -> None:
        for name, piece in self._engine.pieces().items():
            piece.tensor.copy_(state[name])
        self._engine.loaded(step)

    def _inputs(self, step: int) -> tuple[list[MicroBatch], list[Tensor] | None]:
        if self._read is None or self._read[0] != step:
            records = self._feed.next_step(step, 0.0, max(self._proximal.last_needed(step), step))
            assert records is not None, "the folder has every step of its plan"
            self._read = (step, records, self._proximal.of_step(step, records, self._feed, self._engine, self._rules))
        return self._read[1], self._read[2]

    def _parameters(self) -> Tensors:
        pieces = self._engine.own_pieces().items()
        return {name: piece.tensor for name, piece in pieces if name.endswith(".param")}

    def _product(self, left: Tensors, right: Tensors) -> float:
        parts = [(left[name] * right[name]).sum() for name in left]
        total = torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self._engine.device)
        if self._engine.world_size > 1:
            torch.distributed.all_reduce(total)
        return float(total)


def _copy(state: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in state.items()}


if __name__ == "__main__":
    replay(Path(sys.argv[1]), json.loads(sys.argv[2]), mismatch=json.loads(sys.argv[3]))
