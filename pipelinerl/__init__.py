"""PipelineRL: reinforcement learning for language-model agents that trains while it generates.

A domain imports the public modules: `llm`, `async_llm`, `chat`, `rollouts`, `agents`, `testing` and `errors`.
`state` and `utils` keep the names that domains written for the original PipelineRL import. `launch` starts a run.
`status`, `ledger` and `streams` are commands that inspect one (`inspect`). Every other folder implements one role or is
shared by several.
"""

__version__ = "0.1.0"
