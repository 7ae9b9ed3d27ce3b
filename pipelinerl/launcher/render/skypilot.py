"""A SkyPilot task that runs one launcher per node. Each gets its rank and peers from SkyPilot's variables."""

import shlex
from typing import Any

import yaml

from pipelinerl.launcher.render.deployment import Deployment


def render(deployment: Deployment) -> str:
    """Return the task for `sky launch`, which must get each of its secrets with `--secret NAME`."""
    resources: dict[str, Any] = {"cpus": f"{deployment.cores}+"}
    if deployment.gpus_per_node:
        resources["accelerators"] = f"{deployment.gpu}:{deployment.gpus_per_node}"
    if deployment.image:
        resources["image_id"] = f"docker:{deployment.image}"
    arguments = (*deployment.arguments, f"world.run_id={deployment.name}")
    task = {
        "name": deployment.name,
        "num_nodes": deployment.nodes,
        "resources": resources,
        "secrets": dict.fromkeys(["PIPELINERL_SECRET", *deployment.variables]),
        "run": "\n".join(
            [
                "set -euo pipefail",
                f"cd {shlex.quote(deployment.workdir)}",
                'export WORLD_SIZE="$SKYPILOT_NUM_NODES" RANK="$SKYPILOT_NODE_RANK"',
                'export PIPELINERL_HOSTS="$(echo "$SKYPILOT_NODE_IPS" | paste -sd, -)"',
                f"{shlex.quote(deployment.python)} -m pipelinerl.launch {shlex.join(arguments)}",
            ]
        )
        + "\n",
    }
    return yaml.safe_dump(task, sort_keys=False, width=200)
