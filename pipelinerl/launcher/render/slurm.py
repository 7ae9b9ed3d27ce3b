"""A SLURM batch script that writes the run folder, starts every role as a job step, and ends when the actors end.

A role that fails is started again up to `PRL_RESTARTS` times, while the others wait for it. A failure counts only if
every node of the job starts steps. While one does not, the script waits until SLURM gives the lost node up and queues
the job again; if SLURM does not, the script asks for it. The trainer's ranks meet through torchrun's static rendezvous.
The secret is made when the job starts and is only in the job's environment. SIGTERM (`scancel --signal=TERM`, or the
time limit's warning) reaches every role, so that the trainer saves. A job that is queued again resumes the run.
"""

import shlex

from pipelinerl.launcher.render.deployment import Deployment

WARNING_S = 180

_BODY = r"""
set -euo pipefail
umask 077
cd "$PRL_WORKDIR"
export PIPELINERL_SECRET="${PIPELINERL_SECRET:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export PIPELINERL_HOSTS="${PIPELINERL_HOSTS:-$(IFS=,; echo "${nodes[*]}")}"

stopping=
trap 'stopping=1; scancel --signal=TERM "$SLURM_JOB_ID"' TERM

"$PRL_PYTHON" -m pipelinerl.launch "${PRL_ARGUMENTS[@]}" launcher.engine=external

# How long SLURM takes to give a lost node up. It then ends this script and queues the job again.
slurmd_timeout=$(scontrol show config | sed -n 's/^SlurmdTimeout *= *\([1-9][0-9]*\).*/\1/p')
away_s=$((2 * ${slurmd_timeout:-300}))

every_node_starts_steps() {
  timeout 60 srun --overlap --nodes="${#nodes[@]}" --ntasks-per-node=1 --cpu-bind=none true 2> /dev/null
}

# Waits until every node starts steps again, or until SLURM queues the job again.
wait_for_nodes() {
  local until=$((SECONDS + away_s))
  echo "a node of the job does not answer: waiting up to $away_s s for it, or until SLURM queues the job again"
  until [[ -e $PRL_RUN/.ending ]] || every_node_starts_steps; do
    if ((SECONDS > until)); then
      echo "the node is still away: asking SLURM to queue the job again"
      scontrol requeue "$SLURM_JOB_ID"
      until=$((SECONDS + away_s))
    fi
    sleep 5
  done
}

# Runs one role on its node until it has done its part: 0 it has, 3 it left as asked, 2 no restart can mend it.
keep() {
  local role=$1 node=${nodes[$2]} tries=0 code
  while true; do
    code=0
    srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --nodelist="$node" --cpu-bind=none \
      --output="${PRL_RUN//%/%%}/$role/log.txt" --open-mode=append --job-name="$role" \
      "$PRL_RUN/$role/start.sh" || code=$?
    if [[ $code == 0 || $code == 3 || -n $stopping || -e $PRL_RUN/.ending ]]; then return 0; fi
    if [[ $code != 2 ]] && ! every_node_starts_steps; then
      wait_for_nodes
      continue
    fi
    if [[ $code == 2 || $((++tries)) -gt $PRL_RESTARTS ]]; then
      echo "$role failed with code $code: see $PRL_RUN/$role/log.txt"; return 1
    fi
    echo "$role ended with code $code: restart $tries of $PRL_RESTARTS"
    sleep "$tries"
  done
}

rm -f "$PRL_RUN/.ending"
declare -A running=()
waiting_for=0
while read -r role rank; do
  keep "$role" "$rank" &
  running[$!]=$role
  if [[ $role == actor_[0-9]* ]]; then waiting_for=$((waiting_for + 1)); fi
done < "$PRL_RUN/conf/roles.txt"

# The run is done when every actor is, and fails when a role does.
failed=0
while [[ $waiting_for -gt 0 && $failed == 0 && -z $stopping ]]; do
  code=0
  wait -n -p ended "${!running[@]}" || code=$?
  if [[ -z ${ended:-} ]]; then continue; fi
  role=${running[$ended]}
  unset "running[$ended]"
  if [[ $code != 0 && -z $stopping ]]; then failed=1; fi
  if [[ $role == actor_[0-9]* ]]; then waiting_for=$((waiting_for - 1)); fi
done
touch "$PRL_RUN/.ending"
if [[ -z $stopping ]]; then scancel --signal=TERM "$SLURM_JOB_ID"; fi
wait || true
rm -f "$PRL_RUN/.ending"
if [[ $failed == 1 ]]; then exit 1; fi
if [[ -n $stopping ]]; then echo "stopped; a job that is queued again resumes $PRL_RUN"; exit 143; fi
"$PRL_PYTHON" -m pipelinerl.launcher.render.finish "$PRL_RUN"
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
        "--open-mode=append",
        f"--output={deployment.name}-%j.txt",
    ]
    if deployment.gpus_per_node:
        directives.insert(3, f"--gpus-per-node={deployment.gpus_per_node}")
    settings = {
        "PRL_PYTHON": deployment.python,
        "PRL_WORKDIR": deployment.workdir,
        "PRL_RUN": deployment.run_folder,
        "PRL_RESTARTS": "3",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH {directive}" for directive in directives)]
    lines += [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(f"PRL_ARGUMENTS=({shlex.join(deployment.arguments)})")
    return "\n".join(lines) + _BODY
