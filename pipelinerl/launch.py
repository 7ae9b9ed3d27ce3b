"""`python -m pipelinerl.launch --config-name=quickstart output_dir=results/quickstart` starts or resumes an experiment.

The command line is `pipelinerl.launcher.command_line`.
"""

import sys

from pipelinerl.launcher.command_line import main
from pipelinerl.world.process import in_utf8

if __name__ == "__main__":
    in_utf8()
    sys.exit(main())
