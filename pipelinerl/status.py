"""`python -m pipelinerl.status RUN`: one screen about a run (`pipelinerl.inspect.status`)."""

import sys

from pipelinerl.inspect.status import main

if __name__ == "__main__":
    sys.exit(main())
