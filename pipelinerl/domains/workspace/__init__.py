"""A workspace per rollout: an unmodified command-line agent works in a folder of its own, and reaches only its policy.

``run_agent_in_workspace`` is the whole rollout. ``Workspace`` is the interface of the folder, which the embedded jail
implements (``JailWorkspace``), containers (``ContainerWorkspace``), and machines of a provider (``HostedWorkspace``). A
folder without a jail is no workspace.
"""

from pipelinerl.domains.workspace.base import LIMITS, NotCopied, Workspace, pack_folder
from pipelinerl.domains.workspace.containers import ContainerWorkspace
from pipelinerl.domains.workspace.hosted import HostedWorkspace
from pipelinerl.domains.workspace.jailed import JailWorkspace
from pipelinerl.domains.workspace.rollout import HiddenTest, count_passed, run_agent_in_workspace

__all__ = [
    "LIMITS",
    "ContainerWorkspace",
    "HiddenTest",
    "HostedWorkspace",
    "JailWorkspace",
    "NotCopied",
    "Workspace",
    "count_passed",
    "pack_folder",
    "run_agent_in_workspace",
]
