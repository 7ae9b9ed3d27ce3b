"""Saves the trainer's state (when due, at a stop, at the end), and loads it into an engine. All methods are collective.

``start`` blocks only while it copies the state to host memory. A thread on every rank then writes and publishes the
copy. Then the stream records that no checkpoint needs are released.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pipelinerl.config.sections import FinetuneSection
from pipelinerl.finetune import checkpoints
from pipelinerl.finetune.checkpoints import Counters
from pipelinerl.finetune.engines import Engine
from pipelinerl.finetune.export import StagedExport, export_root, stage_export, write_export
from pipelinerl.finetune.pieces import Piece, Pieces
from pipelinerl.finetune.rendezvous import Peers
from pipelinerl.observability.status import RoleStatus
from pipelinerl.weights.pinned import pin_exactly

log = logging.getLogger(__name__)

Positions = dict[str, int]
CLOSE_S = 30.0
"""Longest wait for a save at the end of the process. It never ends if other ranks are gone."""


@dataclass(frozen=True, kw_only=True)
class SaveRules:
    """Where states are saved, and how many are kept."""

    run_dir: Path
    dtype: torch.dtype
    """Dtype of exported models."""
    keep: int
    """Number of checkpoints to keep."""
    keep_exports: int | None
    """Number of exported models to keep. None: all."""

    @property
    def checkpoints(self) -> Path:
        return checkpoints.checkpoint_root(self.run_dir)

    @property
    def exports(self) -> Path:
        return export_root(self.run_dir)


class Saver:
    """Saves the states of one engine."""

    def __init__(
        self,
        engine: Engine,
        rules: SaveRules,
        tokenizer: PreTrainedTokenizerBase,
        sync_streams: Callable[[], None] = lambda: None,
        proximal_state: Callable[[], bytes | None] = lambda: None,
    ):
        """``sync_streams`` makes durable the records that were read, and the metrics. Collective.

        ``proximal_state``: `ProximalPolicy.state` of this rank.
        """
        self._engine, self._rules, self._tokenizer = engine, rules, tokenizer
        self._sync_streams, self._proximal_state = sync_streams, proximal_state
        self._peers = Peers(engine.rank, engine.world_size)
        self._host: dict[str, Piece] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[Positions] | None = None
        self._saved_at = time.monotonic()
        self.step = 0
        """Newest step whose state is saved or being saved."""

    def resume(self) -> Counters | None:
        """Load the newest complete checkpoint into the engine. None if there is none. Collective."""
        counters = load_newest(self._engine, self._peers, self._rules.checkpoints)
        if counters is not None:
            self.step = counters.step
        return counters

    def read_proximal(self, counters: Counters) -> bytes | None:
        """This rank's state of the proximal policy in the checkpoint of ``counters``. Collective.

        None on all ranks if the checkpoint, or a rank of it, has none.
        """
        if counters.proximal_made_at is None:
            return None
        path = self._rules.checkpoints / f"step_{counters.step}"
        return read_proximal(self._peers, path)

    def has_export(self, step: int) -> bool:
        """Whether the model of ``step`` has been exported. Collective."""
        return self._peers.gather((self._rules.exports / f"step_{step}").is_dir())[0]

    def start(self, counters: Counters, *, export: bool) -> None:
        """Start to save the current state, unless its step is already saved. Call ``finish`` before. Collective.

        ``export``: also export the model in Hugging Face format.
        """
        assert self._writing is None, "one state is saved at a time"
        started = time.perf_counter()
        state = self._stage() if counters.step != self.step else None
        model = stage_export(self._engine, self._rules.dtype) if export else None
        self.step, self._saved_at = counters.step, time.monotonic()
        log.info("event=checkpoint_staged step=%d seconds=%.2f", counters.step, time.perf_counter() - started)
        self._writing = self._thread.submit(self._write, state, model, counters)

    def is_idle_since(self, seconds: float) -> bool:
        """Whether nothing is being written and the newest save started at least ``seconds`` ago."""
        return self._writing is None and time.monotonic() - self._saved_at >= seconds

    def poll(self) -> Positions | None:
        """The result of ``finish`` if it does not have to wait, else None."""
        return self.finish() if self._writing is not None and self._writing.done() else None

    def finish(self) -> Positions | None:
        """Wait until the save in progress is published.

        Returns:
            The stream positions from which the oldest kept checkpoint would resume. Records below them are not needed.
            None if no save was started since the last call.
        Raises:
            CheckpointError: the save failed. Earlier checkpoints are intact.
        """
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def close(self) -> None:
        """Wait at most ``CLOSE_S`` for the save in progress, because other ranks may be gone."""
        if self._writing is not None:
            wait([self._writing], timeout=CLOSE_S)
        self._thread.shutdown(wait=False)

    def _stage(self) -> dict[str, Piece]:
        """Copy the state to host memory, which is page-locked for a GPU and reused for the next state."""
        on_gpu = self._engine.device.type == "cuda"
        if on_gpu:
            pin_exactly()
        scaling = _scaling_of(self._engine) if self._engine.rank == 0 else {}
        for name, piece in {**self._engine.own_pieces(), **_rng_of(self._engine), **scaling}.items():
            if name not in self._host:
                memory = torch.empty_like(piece.tensor, device="cpu", pin_memory=on_gpu)
                self._host[name] = Piece(memory, piece.start, piece.whole)
            self._host[name].tensor.copy_(piece.tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize(self._engine.device)
        proximal = self._proximal_state()
        if proximal is None:
            return self._host
        return self._host | {checkpoints.proximal_name(self._engine.rank): checkpoints.byte_piece(proximal)}

    def _write(self, state: Pieces | None, model: StagedExport | None, counters: Counters) -> Positions:
        """In the thread: write, publish, and delete states that are not kept. Collective."""
        rules, started = self._rules, time.perf_counter()
        if state is not None:
            self._peers.together(self._sync_streams)
            path = checkpoints.write(self._peers, rules.checkpoints, state, counters)
            log.info("event=checkpoint_published path=%s seconds=%.2f", path, time.perf_counter() - started)
        if model is not None:
            lm = self._engine.policy.lm
            path = write_export(self._peers, rules.exports, counters.step, model, lm, self._tokenizer)
            log.info("event=model_exported path=%s seconds=%.2f", path, time.perf_counter() - started)
        needed = self._peers.together((lambda: self._prune(counters.epoch)) if self._peers.rank == 0 else dict)
        return needed[0]

    def _prune(self, epoch: int) -> Positions:
        if self._rules.keep_exports is not None:
            checkpoints.prune(self._rules.exports, self._rules.keep_exports)
        kept = checkpoints.prune(self._rules.checkpoints, self._rules.keep)
        oldest = checkpoints.read_counters(kept[-1])
        return oldest.positions if oldest.epoch == epoch else {}


def load_newest(engine: Engine, peers: Peers, root: Path) -> Counters | None:
    """Load the newest complete checkpoint in ``root`` into ``engine``. None if there is none. Collective."""
    found = checkpoints.newest_whole(peers, root)
    if found is None:
        return None
    path, counters = found
    rng = _rng_of(engine)
    optional = {**rng, **_scaling_of(engine)}
    names = peers.together(lambda: checkpoints.read(path, engine.pieces(), optional))[engine.rank]
    engine.loaded(counters.step)
    checkpoints.restore_rng(rng, names, engine.device)
    return counters


def read_proximal(peers: Peers, path: Path) -> bytes | None:
    """This rank's state of the proximal policy in a checkpoint. None on all ranks if any has none. Collective."""
    found = peers.together(lambda: checkpoints.read_bytes(path, checkpoints.proximal_name(peers.rank)))
    return None if None in found else found[peers.rank]


def _rng_of(engine: Engine) -> dict[str, Piece]:
    return checkpoints.rng_pieces(engine.rank, engine.device)


def _scaling_of(engine: Engine) -> dict[str, Piece]:
    """The state of the loss scale, equal on all ranks."""
    return {} if engine.scaling is None else {"loss_scale": Piece(engine.scaling, 0, len(engine.scaling))}


class SaveSchedule:
    """Decides when ``saver`` saves. Calls ``release`` with the positions below which the stream is no longer needed."""

    def __init__(
        self,
        saver: Saver,
        engine: Engine,
        finetune: FinetuneSection,
        status: RoleStatus,
        release: Callable[[Positions], None],
    ):
        self._saver, self._engine, self._finetune = saver, engine, finetune
        self._status, self._release_stream = status, release

    def after_step(self, counters: Counters) -> None:
        """Start the save that is due after a step, if any. Training continues while it is written."""
        if self._is_export_step(counters.step):
            self._save(counters, export=True)
        elif self._is_rolling_due():
            self._save(counters, export=False)
        else:
            self._release(self._saver.poll(), counters.step)

    def export_again(self, counters: Counters) -> None:
        """Export the model of the resumed step if the run died between its checkpoint and its export."""
        if counters.step and self._is_export_step(counters.step) and not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def at_stop(self, counters: Counters) -> None:
        """Save the last finished step, after a request to stop. Returns when it is on disk."""
        if self._saver.step != counters.step:
            self._save(counters, export=False)
        self.wait(counters.step)
        log.info("event=stopped step=%d saved=%d", counters.step, self._saver.step)

    def at_end(self, counters: Counters) -> None:
        """Start to save and export the last step. Call ``wait`` to complete it."""
        self.wait(counters.step)
        if self._saver.step != counters.step or not self._saver.has_export(counters.step):
            self._save(counters, export=True)

    def wait(self, step: int) -> None:
        """Wait until the save in progress is published. ``step``: finished optimizer steps."""
        with self._status.waiting("the checkpoint to be written"):
            self._release(self._saver.finish(), step)

    def close(self) -> None:
        self._saver.close()

    def _save(self, counters: Counters, *, export: bool) -> None:
        self.wait(counters.step)
        self._saver.start(counters, export=export)

    def _is_export_step(self, step: int) -> bool:
        return step % self._finetune.save_checkpoint_steps == 0

    def _is_rolling_due(self) -> bool:
        """Whether on every rank the newest checkpoint is older than `save_checkpoint_minutes`."""
        minutes = self._finetune.save_checkpoint_minutes
        return minutes is not None and self._engine.lowest(int(self._saver.is_idle_since(60 * minutes))) == 1

    def _release(self, needed: Positions | None, step: int) -> None:
        """Release the stream records before the positions of the oldest kept checkpoint."""
        if needed is not None:
            self._release_stream(needed)
            self._status.progress(saved=self._saver.step == step)
