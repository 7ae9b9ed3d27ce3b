"""The network interface through which other nodes reach this one, and the address to listen on.

Gloo and NCCL would otherwise guess it from the machine's own name, which may resolve to loopback or another network.
"""

import ipaddress
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


def listen_address(hostname: str) -> str:
    """The address to listen on so that others reach this node as ``hostname``: no other address of the node answers.

    An IP address of this node is the address itself. Every address (``""``) is the answer for a name that leads to none
    of this node's addresses, or to loopback because that is how the node resolves its own name.
    """
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(hostname, None, socket.AF_INET)})
    except OSError:
        return ""
    given = hostname in found
    local = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    mine = [
        address for address in found if address in local and (given or not ipaddress.ip_address(address).is_loopback)
    ]
    return mine[0] if mine else ""
