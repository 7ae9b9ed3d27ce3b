"""A plugin of vLLM, for one server of a test's run: it takes every update, says that it serves it, and keeps its old
weights.

``LIAR_SERVER`` names the server, ``LIAR_SINCE`` the first version that it swallows. Its probes answer after
``LIAR_PROBE_S``, so that it has served the version for a while.
"""

import os
import sys
import time
from collections.abc import Iterator
from typing import Any


def register() -> None:
    """Runs first in every process of a vLLM server."""
    if os.environ["LIAR_SERVER"] not in sys.argv:
        return
    from pipelinerl.weights.load import worker

    since, probe_s = int(os.environ["LIAR_SINCE"]), float(os.environ["LIAR_PROBE_S"])
    engine = worker.StagedWeightTransferEngine
    swap, differing = engine.finish_weight_update, worker.differing
    swallowed: list[int] = []

    def swallow(self: Any) -> None:
        version = self.receiver.transfer.request.version
        if version < since:
            swap(self)
        else:
            swallowed.append(version)

    def differing_late(*args: Any) -> Iterator[str]:
        if swallowed:
            time.sleep(probe_s)
        return differing(*args)

    engine.finish_weight_update, worker.differing = swallow, differing_late  # type: ignore[method-assign]
