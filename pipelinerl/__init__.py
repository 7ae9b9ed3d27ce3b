"""PipelineRL: reinforcement learning for language-model agents that trains while it generates.

A domain imports the public modules: `llm`, `async_llm`, `chat`, `rollouts`, `agents`, `testing` and `errors`.
`state` and `utils` keep the names that domains written for the original PipelineRL import. `launch` is the entry: it
starts a run. `__main__` is the command `pipelinerl`, which runs every program by a short name. `status` and `ledger`
are names for `python -m` of commands in `inspect`. Every other folder implements one role, holds commands of one kind,
or is shared by several roles.
"""

__version__ = "0.1.0"
