"""Measures the uplink of a server's worker, by bytes without meaning that it sends to the trainer.

A server that gives slowly is the last of every chain, where nobody pulls from it. So an update does not show when it
has become fast again.
"""

import time
from contextlib import closing

from pipelinerl.weights.protocol import Address, Gauge
from pipelinerl.weights.transfer.wire import DATA, Connection, WireError

GAUGE_S = 0.5
"""A measurement takes so long, or until so many bytes have come:"""
GAUGE_BYTES = 1 << 30
GAUGE_BUCKET_BYTES = 64 << 10
PATIENCE_S = 2.0


def uplink_rate(address: Address, secret: str) -> float:
    """Returns the bytes per second that the process at ``address`` sends.

    Raises:
        WireError: it does not answer, or sends nothing for ``PATIENCE_S``.
    """
    with closing(Connection.dial(address, secret, PATIENCE_S)) as connection:
        connection.send_message(Gauge(num_bytes=GAUGE_BYTES, bucket_bytes=GAUGE_BUCKET_BYTES))
        bucket, got, began = memoryview(bytearray(GAUGE_BUCKET_BYTES)), 0, 0.0
        while got < GAUGE_BYTES:
            kind, length = connection.receive()
            if kind != DATA or length != GAUGE_BUCKET_BYTES:
                raise WireError(f"a frame of kind {kind} and {length} bytes came instead of a bucket")
            connection.read_into(bucket)
            now = time.monotonic()
            if not began:
                began = now  # the first bucket may have come at once, out of a burst
                continue
            got += length
            if now - began >= GAUGE_S:
                break
        return got / (time.monotonic() - began)
