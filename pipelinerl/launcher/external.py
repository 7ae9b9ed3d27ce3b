"""`launcher.engine=external`: everything but the start.

A platform starts `<job>/start.sh` of every role in `conf/roles.txt`, on the node of the given rank, with the run's
secret in the environment.
"""

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.disk import replace_file
from pipelinerl.world import Job

ROLES_FILE = Path("conf") / "roles.txt"


def write_roles_file(run_dir: Path, jobs: Sequence[Job]) -> None:
    """One line `<job> <node rank>` for each role that the platform is to start; none for a run that is finished."""
    text = "".join(f"{job.name} {job.node_rank}\n" for job in jobs)
    replace_file(run_dir / ROLES_FILE, text, mode=0o600)
