"""The command `pipelinerl evaluate`: a model on the test problems of an experiment, without a run."""
