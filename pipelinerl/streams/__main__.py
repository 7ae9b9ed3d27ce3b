"""`python -m pipelinerl.streams tail | stats | verify RUN`: a run's streams (`pipelinerl.inspect.streams`)."""

import sys

from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.streams import main

if __name__ == "__main__":
    sys.exit(told_in_one_line(main))
