"""PipelineRL: reinforcement learning for language-model agents that trains while it generates.

A domain imports the public modules: `llm`, `async_llm`, `chat`, `rollouts`, `agents`, `testing` and `errors`.
`state` and `utils` keep names that domains written for the original PipelineRL import. `launch` starts a run; `status`,
`ledger` and `streams` are commands about one (`inspect`). Every other folder belongs to a role or to all of them.
"""

__version__ = "0.1.0"
