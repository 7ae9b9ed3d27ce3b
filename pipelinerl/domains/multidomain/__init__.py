"""Data sets of several domains by names with a prefix, as PipelineRL's experiments give them to one loader."""
