"""`python -m pipelinerl.render --target slurm …` prints the document with which a platform runs an experiment.

The command line is `pipelinerl.launcher.render.command`.
"""

import sys

from pipelinerl.config.environment import in_utf8
from pipelinerl.errors import told_in_one_line
from pipelinerl.launcher.render.command import main

if __name__ == "__main__":
    in_utf8()
    sys.exit(told_in_one_line(main))
