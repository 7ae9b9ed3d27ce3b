"""`python -m pipelinerl.status RUN` shows the state of a run on one screen (`pipelinerl.inspect.status`)."""

import sys

from pipelinerl.config.environment import in_utf8
from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.status import main

if __name__ == "__main__":
    in_utf8()
    sys.exit(told_in_one_line(main))
