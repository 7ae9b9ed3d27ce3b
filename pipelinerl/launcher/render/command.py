"""`python -m pipelinerl.render --target slurm --nodes 2 -- --config-name=base output_dir=/shared/run`."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from pipelinerl.launcher.render import jobset, slurm
from pipelinerl.launcher.render.deployment import CPUS, Deployment

TARGETS: Mapping[str, Callable[[Deployment], str]] = {"slurm": slurm.render, "jobset": jobset.render}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pipelinerl.render",
        description="Print the document with which a platform runs an experiment. After --, give the arguments of "
        "pipelinerl.launch.",
    )
    parser.add_argument("--target", required=True, choices=sorted(TARGETS))
    parser.add_argument("--name", default="pipelinerl", help="of the job (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--cpus-per-node", type=int, help=f"(default: what the plan's roles need on GPUs, else {CPUS})")
    parser.add_argument("--hours", type=int, default=24, help="time limit (default: %(default)s)")
    parser.add_argument("--python", default="python", help="interpreter on the machines (default: %(default)s)")
    parser.add_argument("--workdir", default=".", help="folder on the machines in which roles start")
    parser.add_argument("--image", default="", help="jobset: the container's image")
    parser.add_argument("--extra-servers", type=int, default=0, help="jobset: servers that join the nodes' own")
    parser.add_argument("--nodes-per-server", type=int, default=1, help="jobset: pods of each of those servers")
    parser.add_argument("arguments", nargs="+", metavar="-- ARGUMENT", help="of pipelinerl.launch")
    values = vars(parser.parse_args(argv))
    target = values.pop("target")
    print(TARGETS[target](Deployment(**{**values, "arguments": tuple(values["arguments"])})), end="")
    return 0
