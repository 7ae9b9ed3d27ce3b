"""Ray nodes on this machine, steered by lines on stdin: `python ray_nodes.py CPUS CPUS …`, the head's first.

Says the cluster's address and the id of its head, and after each line that it is done. `remove ID` kills a node as a
power cut does, and `add` starts one with 1 CPU. Everything ends with stdin. It is a process of its own, because Ray
reads its environment at its import.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
}


class RayNodes:
    """The cluster, from the test's side."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self._process = process
        self.address, self.head = self._answer().split()

    def do(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("> "):
                return line[2:].strip()
        raise AssertionError("the cluster ended")


@contextmanager
def ray_nodes(cpus: Sequence[int], env: Mapping[str, str], log: Path) -> Iterator[RayNodes]:
    with open(log, "w") as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, *map(str, cpus)],
            env={**env, **ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield RayNodes(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(90)
        process.stdout.close()


def main(cpus: list[int]) -> None:
    from ray.cluster_utils import Cluster

    here = {"node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**here, "num_cpus": cpus[0], "include_dashboard": False})
    nodes = [cluster.add_node(**here, num_cpus=count) for count in cpus[1:]]
    print(">", cluster.address, cluster.head_node.node_id, flush=True)
    for line in sys.stdin:
        action, _, name = line.strip().partition(" ")
        if action == "remove":
            cluster.remove_node(next(node for node in nodes if node.node_id == name), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(**here, num_cpus=1))
        print("> done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]])
