"""PipelineRL: reinforcement learning for language-model agents that trains while it generates.

A domain imports the public modules: `llm`, `async_llm`, `chat`, `rollouts`, `agents`, `testing` and `errors`. Domains
written for the original PipelineRL also import `state`, `utils` and `countdown_utils`. `__main__` is the command
`pipelinerl`; `launch`, `render` and `status` are commands for `python -m`. docs/architecture.md describes the folders.
"""

__version__ = "0.1.0"
