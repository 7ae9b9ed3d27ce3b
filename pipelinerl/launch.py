"""`python -m pipelinerl.launch --config-name=quickstart output_dir=results/quickstart` starts or resumes an experiment.

The command line is `pipelinerl.launcher.command_line`.
"""

import sys

from pipelinerl.config.environment import in_utf8
from pipelinerl.launcher.command_line import main

if __name__ == "__main__":
    in_utf8()
    sys.exit(main())
