"""`python -m pipelinerl.streams tail | stats | verify RUN`: a run's streams (`pipelinerl.inspect.streams`)."""

import sys
from importlib import import_module

from pipelinerl.errors import told_in_one_line

if __name__ == "__main__":
    # By its name, because `inspect` stands above `streams`: an import would close a circle between the folders.
    sys.exit(told_in_one_line(import_module("pipelinerl.inspect.streams").main))
