"""`python -m pipelinerl.finetune.ranks … -- COMMAND`: starts the trainer ranks of one node as one process of the run.

All ranks end together: with exit 0 when all have ended so, and at once when one of them fails. SIGTERM goes to every
rank, which saves and ends. torchrun would kill ranks that save for longer than 30 s (docs/cluster.md).
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from pipelinerl.config.environment import RANKS_FILE_VARIABLE
from pipelinerl.world.process import kept


def rank_environments(args: argparse.Namespace, folder: str) -> list[dict[str, str]]:
    """Returns the variables of every rank of this node. ``folder`` is private and new."""
    shared = {
        "WORLD_SIZE": str(args.world_size),
        "LOCAL_WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": args.master_addr,
        "MASTER_PORT": str(args.master_port),
    }
    if args.ranks == args.world_size:
        shared[RANKS_FILE_VARIABLE] = os.path.join(folder, "ranks")
    return [shared | {"RANK": str(args.first_rank + i), "LOCAL_RANK": str(i)} for i in range(args.ranks)]


def run_processes(argv: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Runs ``argv`` once with each of ``environments``. Returns 0, or the exit code of the rank that failed first.

    128 plus the signal's number if a signal killed the rank, which the last line of the log names.
    """
    ranks: dict[int, subprocess.Popen[bytes]] = {}
    names: dict[int, str] = {}

    def pass_on(number: int, _: object) -> None:
        for process in ranks.values():
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    for environment in environments:
        process = subprocess.Popen(kept(argv), env=os.environ | environment)
        ranks[process.pid], names[process.pid] = process, environment["RANK"]
    while ranks:
        pid, status = os.wait()
        ended = ranks.pop(pid)
        ended.returncode = code = os.waitstatus_to_exitcode(status)
        if code:
            for other in ranks.values():
                other.kill()
                other.wait()
            if code > 0:  # its own last error is in the log
                return code
            said = f"error: rank {names[pid]} was killed by signal {-code} ({signal.strsignal(-code)})"
            print(said, file=sys.stderr, flush=True)
            return 128 - code
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="ranks of this node")
    parser.add_argument("--first-rank", type=int, required=True, help="rank of the first of them")
    parser.add_argument("--world-size", type=int, required=True, help="ranks of all nodes")
    parser.add_argument("--master-addr", required=True, help="where the ranks of several nodes meet")
    parser.add_argument("--master-port", type=int, required=True)
    end = sys.argv.index("--")
    args, command = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        return run_processes([sys.executable, *command], rank_environments(args, folder))


if __name__ == "__main__":
    sys.exit(main())
