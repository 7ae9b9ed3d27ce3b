"""PipelineRL: reinforcement learning for language-model agents that trains while it generates."""

__version__ = "0.1.0"
