"""Counts what the preprocessor dropped, because a drop makes room for another dispatch at once (docs/pacing.md)."""

import threading
from pathlib import Path

from pipelinerl.errors import StreamError
from pipelinerl.records import PreprocessorProgress, topics
from pipelinerl.streams import SingleStreamSpec, open_reader

LISTEN_S = 0.5
"""Longest time after which the thread notices `stop`. Records wake it at once."""


class DropListener:
    """Counts the samples that the preprocessor dropped. A separate thread reads them from topic ``preprocessor``."""

    def __init__(self, run_dir: Path, replica: int):
        self._spec = SingleStreamSpec(run_dir, topics.PREPROCESSOR, instance=replica)
        self._total = 0
        self._room = 0
        self._by_domain: dict[str, int] = {}
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="preprocessor-drops", daemon=True)
        self._thread.start()

    def total(self) -> int:
        return self._total

    def room(self) -> int:
        """What was published and fills no batch, in units of `finetune.batch_unit`."""
        if self._failure is not None:
            raise StreamError(f"the listener on {self._spec} died: {self._failure}") from self._failure
        return self._room

    def by_domain(self) -> dict[str, int]:
        return self._by_domain

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _listen(self) -> None:
        """Reads progress records until ``stop`` or a failure, which the next ``room`` raises."""
        try:
            with open_reader(self._spec, PreprocessorProgress, name=None, over_damage=True) as reader:
                while not self._stop.is_set():
                    for _, progress in reader.poll(LISTEN_S):
                        self._total = progress.samples_dropped
                        self._room = progress.samples_dropped if progress.room is None else progress.room
                        self._by_domain = progress.dropped_by_domain
        except Exception as error:  # noqa: BLE001 — the thread's boundary
            self._failure = error
