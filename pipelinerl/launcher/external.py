"""`launcher.engine=external`: the launcher prepares the run folder and a platform starts the roles.

The platform runs `<job>/start.sh` of every role in `conf/roles.txt` on the node of the given rank, with the run's
secret in the environment.
"""

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.world import Job
from pipelinerl.world.disk import replace_file

ROLES_FILE = Path("conf") / "roles.txt"


def write_roles_file(run_dir: Path, jobs: Sequence[Job]) -> None:
    """Write one line `<job> <node rank>` for each role that the platform must start. A finished run has no lines."""
    text = "".join(f"{job.name} {job.node_rank}\n" for job in jobs)
    replace_file(run_dir / ROLES_FILE, text, mode=0o600)
