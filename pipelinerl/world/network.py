"""Addresses and ports of a run: the interface through which other nodes reach this one, and one block of free ports.

Gloo and NCCL would guess the interface from the machine's name, which may resolve to loopback or another network. One
node searches a free block. Several nodes choose the same one without communication: from ``world.port_base``, or from
the run's identity.
"""

import ipaddress
import random
import socket
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from pipelinerl.errors import WorldError

MAX_LOOK_UPS = 64
"""Threads that wait for a name server at the same time."""
LOWEST_PORT = 15000
"""Services of a machine (databases, Ray, dashboards) have lower ones by convention."""
DEFAULT_EPHEMERAL_START = 32768
"""Linux's default. Ports that every node must choose alike end here, with any setting of a node."""
LARGEST_PORT = 65535  # 16 bits


def interface_of(hostname: str) -> str | None:
    """Name of the local interface that has the address of ``hostname``. None if no interface of this node has it."""
    addresses = _addresses_of(hostname)
    for name, entries in psutil.net_if_addrs().items() if addresses else ():
        if any(entry.address.partition("%")[0] in addresses for entry in entries):
            return name
    return None


def look_up(hostnames: Iterable[str]) -> None:
    """Look all these names up at the same time, for the other functions: an unknown one takes seconds."""
    names = sorted(set(hostnames))
    with ThreadPoolExecutor(MAX_LOOK_UPS) as pool:
        _looked_up.update(zip(names, pool.map(_addresses_of, names), strict=True))


_looked_up: dict[str, frozenset[str]] = {}


def _addresses_of(hostname: str) -> frozenset[str]:
    if hostname in _looked_up:
        return _looked_up[hostname]
    try:
        found = frozenset(str(info[4][0]) for info in socket.getaddrinfo(hostname, None))
    except OSError:
        return frozenset()
    return _looked_up.setdefault(hostname, found)


def listen_address(hostname: str) -> str:
    """The one address to listen on so that others reach this node as ``hostname``.

    It is ``""``, all addresses, for a name that leads to none of this node's addresses, or to loopback.
    """
    found = sorted(address for address in _addresses_of(hostname) if ":" not in address)
    given = hostname in found
    local = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    mine = [
        address for address in found if address in local and (given or not ipaddress.ip_address(address).is_loopback)
    ]
    return mine[0] if mine else ""


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
    """First port that the kernel gives to outgoing connections. Lower ones stay free between check and use."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split()[0])
    except (OSError, ValueError):
        return DEFAULT_EPHEMERAL_START


def _search_range(count: int) -> range:
    end = ephemeral_start()
    if end - LOWEST_PORT <= 2 * count:
        end = LARGEST_PORT
    return range(LOWEST_PORT, max(end - count, LOWEST_PORT + 1))


def find_port_block(host: str, count: int, *, is_free: Callable[[str, int], bool] = is_port_free) -> int:
    """Return the first of ``count`` consecutive free ports."""
    bases = _search_range(count)
    start = random.choice(bases)  # runs that start together choose different blocks
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
    """Return the first of ``count`` ports by a hash of the run's identity, the same on every node."""
    bases = range(LOWEST_PORT, max(DEFAULT_EPHEMERAL_START - count, LOWEST_PORT + 1))
    return bases[zlib.crc32(identity.encode()) % len(bases)]


def check_ports(host: str, ports: Iterable[tuple[str, int]], *, key: str) -> None:
    """Refuse (owner, port) pairs that are in use on this node. ``key`` names the setting to change."""
    for owner, port in ports:
        if not is_port_free(host, port):
            raise WorldError(f"{key}: port {port} of {owner} is in use on this node: choose another value, or null")
