"""``python -m pipelinerl.actor --run-dir R --job actor_0``"""

from pipelinerl.actor.role import run
from pipelinerl.observability.role import run_role

if __name__ == "__main__":
    run_role(run)
