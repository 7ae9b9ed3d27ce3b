"""`python -m pipelinerl.ledger RUN` shows what became of every dispatched rollout (`pipelinerl.inspect.ledger`)."""

import sys

from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.ledger import main

if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
