"""A user's domains in the manner of PipelineRL's, one module each: its imports, signatures and calls, written anew."""
