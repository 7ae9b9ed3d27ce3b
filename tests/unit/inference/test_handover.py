"""The order to a worker to pull an update."""

from typing import Any, cast

import pytest

from pipelinerl.inference.weight_update import Handover
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.transfer.wire import Connection, WireError


def test_worker_that_is_silent_for_half_a_minute_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    def dial(address: Address, secret: str, patience_s: float) -> Connection:
        waited.append(patience_s)
        raise WireError("silent")

    monkeypatch.setattr(Connection, "dial", dial)
    with pytest.raises(WireError, match="silent"):
        Handover(Address("worker", 1), "secret").run(cast(Any, None))
    assert waited == [30.0]
