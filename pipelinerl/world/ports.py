"""Chooses the ports of a run: one contiguous block that is free on this node.

In a world of one node a free block is searched. In a world of several nodes every launcher must choose the same block
without communication. It therefore starts at ``world.port_base`` or at a number derived from the run's identity, and
each launcher checks the ports of its own node.
"""

import random
import socket
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelinerl.errors import WorldError

LOWEST_PORT = 15000
DEFAULT_EPHEMERAL_START = 32768
LARGEST_PORT = 65535


def is_port_free(host: str, port: int) -> bool:
    """Whether a server could listen on this address now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
    return True


def ephemeral_start() -> int:
    """First port that the kernel gives to outgoing connections. Ports below it stay free between check and use."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL_START


def _search_range(count: int) -> range:
    end = ephemeral_start()
    if end - LOWEST_PORT <= 2 * count:
        end = LARGEST_PORT
    return range(LOWEST_PORT, max(end - count, LOWEST_PORT + 1))


def find_port_block(host: str, count: int, *, is_free: Callable[[str, int], bool] = is_port_free) -> int:
    """Return the first of ``count`` consecutive free ports.

    The search starts at a random port, so that runs which start together choose different blocks.
    """
    bases = _search_range(count)
    start = random.choice(bases)
    for begin, end in ((start, bases.stop), (bases.start, start)):
        base = begin
        while base < end:
            busy = next((port for port in range(base + count - 1, base - 1, -1) if not is_free(host, port)), None)
            if busy is None:
                return base
            base = busy + 1
    raise WorldError(
        f"no {count} consecutive free ports on {host} in {bases.start}–{bases.stop + count}: set world.port_base"
    )


def derive_port_base(identity: str, count: int) -> int:
    """Return the first of ``count`` ports, derived from a hash of the run's identity and so the same on every node."""
    bases = range(LOWEST_PORT, max(DEFAULT_EPHEMERAL_START - count, LOWEST_PORT + 1))
    return bases[zlib.crc32(identity.encode()) % len(bases)]


def check_ports(
    host: str, ports: Iterable[tuple[str, int]], *, key: str, is_free: Callable[[str, int], bool] = is_port_free
) -> None:
    """Refuse (owner, port) pairs that are in use on this node. ``key`` names the setting to change."""
    for owner, port in ports:
        if not is_free(host, port):
            raise WorldError(f"{key}: port {port} of {owner} is in use on this node: choose another value, or null")
