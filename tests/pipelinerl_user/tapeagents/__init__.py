"""A stand-in for what PipelineRL's domains use of tapeagents, in the names and calls of its version 0.1.16."""
