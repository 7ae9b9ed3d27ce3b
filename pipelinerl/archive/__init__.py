"""The bounded archive of a run: `archive/<job>/step_<n>.kept` and `.rest` in the run folder.

The preprocessor keeps rollouts with their fates. Every rank of the trainer keeps its log-probabilities of the same
rollouts. `choice` chooses them without communication between the two. `folder` keeps the files within their bound.
"""

from pipelinerl.archive.choice import chosen, flags_of
from pipelinerl.archive.folder import ARCHIVE_DIR, StepArchive, open_archive, read_archive

__all__ = ["ARCHIVE_DIR", "StepArchive", "chosen", "flags_of", "open_archive", "read_archive"]
