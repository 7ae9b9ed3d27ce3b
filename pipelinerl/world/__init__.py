"""The machines of a run: environment → cluster → jobs on devices, and settings of this process and machine.

`cluster`, `placement` and `map` are pure, except that they count GPUs and cores and check ports (`network`). `tls`
makes certificates, `disk` writes durable files, `process` changes this process. The package imports no torch.
"""

from pipelinerl.world.cluster import Cluster, Node, read_cluster, visible_devices
from pipelinerl.world.map import Job, Span, WorldMap, build_world, check_local_devices, map_world
from pipelinerl.world.network import interface_of

__all__ = [
    "Cluster",
    "Job",
    "Node",
    "Span",
    "WorldMap",
    "build_world",
    "check_local_devices",
    "interface_of",
    "map_world",
    "read_cluster",
    "visible_devices",
]
