"""Why a run does not learn: what is on record about it, the checks that read it, and the command `pipelinerl why`."""
