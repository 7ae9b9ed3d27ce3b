"""The network interface through which other nodes reach this one.

Gloo and NCCL would otherwise guess it from the machine's own name, which may resolve to loopback or another network.
"""

import socket

import psutil


def interface_of(hostname: str) -> str | None:
    """Name of the local interface that has the address of ``hostname``. None if no interface of this node has it."""
    try:
        addresses = {info[4][0] for info in socket.getaddrinfo(hostname, None)}
    except OSError:
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] in addresses for entry in entries):
            return name
    return None
