"""The games of ServiceNow's PipelineRL, for its experiments: their data, prompts, turns and rewards.

`pipelinerl.domains.guessing` and `pipelinerl.domains.counting` are other games. The code is this project's. Prompts and
data, in the constants and files that say so, are PipelineRL's (github.com/ServiceNow/PipelineRL), Copyright 2024
ServiceNow, Inc., under the Apache License 2.0.
"""
