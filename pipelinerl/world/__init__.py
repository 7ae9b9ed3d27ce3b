"""Environment → cluster → jobs on devices.

Pure, except that it counts GPUs and cores and checks ports. It imports no torch.
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
