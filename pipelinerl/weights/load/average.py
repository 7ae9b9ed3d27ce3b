"""The weights of a teacher that is a moving average of the policy (docs/objectives.md), as one worker keeps them.

    θ_T ← β^k θ_T + (1 − β^k) θ        θ of version v, θ_T of version v − k

So β counts optimizer steps. The sum is float32, because in bfloat16 most increments of 1 − β would round to nothing.
Steps that the trainer makes again after a restart stay in the average only if their file was written and the server
took no version from the checkpoint to there.
"""

import hashlib
import logging
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch

from pipelinerl.errors import WeightUpdateError
from pipelinerl.weights.layout import Layout, torch_dtype
from pipelinerl.weights.protocol import Averaging
from pipelinerl.weights.transfer.shard import Shard
from pipelinerl.world.disk import make_folder, replacement

log = logging.getLogger(__name__)

CHUNK = 1 << 22
"""Weights blended at a time, so that no copy of all of them is made."""
NAME = re.compile(r"^(\d+)-(\d+)-([0-9a-f]{16})\.float32$")
"""Version, worker, form."""


class Average:
    """The average of one worker.

    Args:
        averaging: its decay and its files.
        worker, workers: index of this one in its server, and their number. A file counts if each has written its own.
        allocate: makes a flat uint8 buffer of a number of bytes.
    """

    def __init__(self, averaging: Averaging, *, worker: int, workers: int, allocate: Callable[[int], torch.Tensor]):
        self._decay, folder, self._every, self._kept = averaging
        self._folder = Path(folder)
        self._worker, self._workers, self._allocate = worker, workers, allocate
        self._form = ""
        """Identity of the average: another layout or shard is another average."""
        self._values = self._served = torch.empty(0)
        """float32 [N], and the same in the type of a version. One tensor if that is float32."""
        self._held: tuple[str, int] | None = None
        """Sender and version of the average. None = it is unknown."""
        self._filed = 0
        """Version of the newest file."""
        self._writing: threading.Thread | None = None

    @property
    def buffer(self) -> torch.Tensor:
        """Flat uint8: the average in the form of what was staged."""
        return self._served.view(torch.uint8)

    @torch.no_grad()
    def take(self, key: str, layout: Layout, shard: Shard | None, staged: torch.Tensor) -> torch.Tensor:
        """Blends a version into the average. Returns ``buffer``.

        Args:
            key: "sender/version".
            shard: what is staged of the layout. None = all.
            staged: flat uint8, which stays as it is.
        Raises:
            WeightUpdateError: the version's tensors are of several types.
        """
        if self._writing is not None:
            self._writing.join()
        sender, _, number = key.rpartition("/")
        version, theirs = int(number), staged.view(_common_dtype(layout))
        form = hashlib.sha256(msgspec.json.encode(layout.specs)).hexdigest()[:16] if shard is None else shard.name
        self._make_room(form, theirs)
        before, self._held = self._version_before(sender, version), None  # a blend that fails leaves an unknown average
        if before is None:
            log.log(logging.WARNING if version else logging.INFO, "event=average_begins version=%d", version)
            self._blend(theirs, 1.0)
        else:
            self._blend(theirs, 1.0 - self._decay ** (version - before))
        self._held = sender, version
        if before is None or version // self._every > self._filed // self._every:
            writing = threading.Thread(target=self._write, args=(version,), name="average-file", daemon=True)
            writing.start()
            self._writing, self._filed = writing, version
        return self.buffer

    def _make_room(self, form: str, theirs: torch.Tensor) -> None:
        if form == self._form:
            return
        self._held, self._form = None, form
        self._values = self._served = torch.empty(0)  # frees them before others are made
        self._values = self._allocate(4 * theirs.numel()).view(torch.float32)
        is_enough = theirs.dtype == torch.float32
        self._served = self._values if is_enough else self._allocate(theirs.nbytes).view(theirs.dtype)

    def _version_before(self, sender: str, version: int) -> int | None:
        """Returns the version of the average that ``version`` goes on from, held or in a file. None = there is none."""
        if self._held is not None:
            held_sender, held = self._held
            if held == version or (held < version and held_sender == sender):
                return held
        # What lies ahead is of steps that a trainer makes again after it went back to a checkpoint.
        files = self._files()
        for ahead in [one for one in files if one > version]:
            files.pop(ahead).unlink(missing_ok=True)
        for found in sorted(files, reverse=True):
            workers = {path.name.split("-")[1] for path in self._folder.glob(f"{found}-*.float32")}
            values = np.fromfile(files[found], dtype=np.float32)
            if len(workers) == self._workers and len(values) == self._values.numel():
                self._values.copy_(torch.from_numpy(values))
                self._filed = found
                log.info("event=average_read version=%d file=%s", found, files[found])
                return found
        return None

    def _blend(self, theirs: torch.Tensor, weight: float) -> None:
        for start in range(0, theirs.numel(), CHUNK):
            part = slice(start, start + CHUNK)
            self._values[part].lerp_(theirs[part].to(self._values), weight)
            if self._served is not self._values:
                self._served[part].copy_(self._values[part])

    def _files(self) -> dict[int, Path]:
        """Returns this worker's files of the form, by version."""
        found = [(NAME.match(path.name), path) for path in self._folder.glob("*.float32")]
        return {
            int(match[1]): path
            for match, path in found
            if match is not None and int(match[2]) == self._worker and match[3] == self._form
        }

    def _write(self, version: int) -> None:
        path = self._folder / f"{version}-{self._worker}-{self._form}.float32"
        try:
            make_folder(self._folder)
            with replacement(path, sync=True) as file:
                file.write(self._values.cpu().numpy().data)
            for old in sorted(files := self._files())[: -self._kept]:
                files[old].unlink(missing_ok=True)
        except OSError as error:  # the average goes on, and the next file holds it
            log.error(
                "event=average_not_written version=%d file=%s reason=%s", version, path, os.strerror(error.errno or 0)
            )


def _common_dtype(layout: Layout) -> torch.dtype:
    dtypes = {spec.dtype for spec in layout.specs}
    if len(dtypes) > 1 or not all(torch_dtype(name).is_floating_point for name in dtypes):
        raise WeightUpdateError(
            f"a version has tensors of several types ({', '.join(sorted(dtypes))}), which cannot be averaged: name a "
            "`model_path` in `teachers` instead of `ema`"
        )
    return torch_dtype(dtypes.pop())
