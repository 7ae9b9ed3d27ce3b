"""The server's process tells its workers directly to pull an update, without involving the engine or decoding.

Each worker has one connection for the duration of the update. Hanging up abandons the update.
"""

import msgspec

from pipelinerl.weights.protocol import Address, Failed, PullUpdate, Staged, WeightUpdateRequest
from pipelinerl.weights.transfer.wire import Connection, WireError

PATIENCE_S = 30.0
"""A worker that sends nothing for so long is frozen: it normally sends several signs of life per second."""
_replies: msgspec.json.Decoder[Staged | Failed] = msgspec.json.Decoder(Staged | Failed)


class TransferError(WireError):
    """A worker's transfer failed. ``links``: what the worker saw of its sources."""

    def __init__(self, failed: Failed):
        super().__init__(failed.error)
        self.links = failed.links


class Handover:
    """One update of one worker."""

    def __init__(self, address: Address, secret: str):
        self._address, self._secret = address, secret
        self._connection: Connection | None = None
        self._is_given_up = False

    def run(self, request: WeightUpdateRequest) -> Staged:
        """Blocks until the update is staged.

        Raises:
            TransferError: the transfer failed.
            WireError: the worker is gone or frozen, or ``give_up`` was called.
        """
        self._connection = connection = Connection.dial(self._address, self._secret, PATIENCE_S)
        try:
            if self._is_given_up:
                raise WireError("given up")
            reply: Staged | Failed = connection.ask(PullUpdate(request=request), _replies)
        finally:
            connection.close()
        if isinstance(reply, Failed):
            raise TransferError(reply)
        return reply

    def give_up(self) -> None:
        """Abandons the update. Any thread may call it."""
        self._is_given_up = True
        if self._connection is not None:
            self._connection.interrupt()
