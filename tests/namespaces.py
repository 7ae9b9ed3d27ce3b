"""Two network namespaces of this machine with a cable between them: two nodes, as far as the network is concerned."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


def are_possible() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@dataclass(frozen=True)
class Nodes:
    """Two namespaces and the cable between them."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "cable", state)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two connected namespaces, which end with the context."""
    tag, net = os.getpid() % 10000, 100 + os.getpid() % 100
    nodes = Nodes((f"prl{tag}a", f"prl{tag}b"), (f"10.203.{net}.1", f"10.203.{net}.2"))
    try:
        for name in nodes.names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = nodes.names
        ip("-n", first, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", second)
        for name, address in zip(nodes.names, nodes.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield nodes
    finally:
        for name in nodes.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)
