"""A SLURM batch script that starts a launcher on every node, each as a task of one job step.

The launchers meet by leases in the run folder, which all nodes share. If the run ends for a lost node, the launchers'
shells ask SLURM to queue the job again, because the script itself may be on that node. SIGTERM (`scancel --signal=TERM
JOB`, or the time limit's warning) reaches every role, so that the trainer saves.
"""

import shlex

from pipelinerl.launcher.render.deployment import Deployment

WARNING_S = 180
"""Before the time limit: a trainer's last save, as long as `launcher.save_timeout_s`, fits into it."""

_BODY = r"""
set -euo pipefail
umask 077
cd "$PRL_WORKDIR"
export PIPELINERL_SECRET="${PIPELINERL_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

every_node_starts_steps() {
  timeout 60 srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none true \
    2> /dev/null
}

# Runs the launcher of a node. The first one leads: its exit code is the run's. SIGTERM reaches this shell, too.
launch() {
  local code=0
  trap : TERM
  "$PRL_PYTHON" -m pipelinerl.launch "$@" || code=$?
  if [[ $code == 1 ]] && ! every_node_starts_steps; then
    echo "a node of the job is lost: asking SLURM to queue the job again"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60 # in which SLURM ends this shell
  fi
  exit $((SLURM_NODEID ? 0 : code))
}
export PRL_PYTHON
export -f launch every_node_starts_steps

# The launchers decide what an exit or a lost node means, so neither ends the job or the step.
trap 'scancel --signal=TERM "$SLURM_JOB_ID"' TERM
srun --no-kill --kill-on-bad-exit=0 --wait=0 --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
  --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=none bash -c 'launch "$@"' launcher "${PRL_ARGUMENTS[@]}" &
launchers=$!
while kill -0 "$launchers" 2> /dev/null; do wait "$launchers" || true; done # SIGTERM interrupts a wait
wait "$launchers"
"""


def render(deployment: Deployment) -> str:
    """Return the script for `sbatch`."""
    directives = [
        f"--job-name={deployment.name}",
        f"--nodes={deployment.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={deployment.cores}",
        f"--time={deployment.hours}:00:00",
        f"--signal=B:TERM@{WARNING_S}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--output={deployment.name}-%j.txt",
    ]
    if deployment.gpus_per_node:
        directives.insert(3, f"--gpus-per-node={deployment.gpus_per_node}")
    settings = {"PRL_PYTHON": deployment.python, "PRL_WORKDIR": deployment.workdir}
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)]
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(f"PRL_ARGUMENTS=({shlex.join(deployment.arguments)})")
    return "\n".join(lines) + _BODY
