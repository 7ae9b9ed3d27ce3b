"""`python -m pipelinerl.ledger RUN` shows what became of every dispatched rollout (`pipelinerl.inspect.ledger`)."""

import sys

from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.ledger import main
from pipelinerl.world.process import in_utf8

if __name__ == "__main__":
    in_utf8()
    sys.exit(told_in_one_line(main))
