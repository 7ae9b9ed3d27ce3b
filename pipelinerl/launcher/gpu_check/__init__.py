"""`pipelinerl gpu-check`: ten minutes on a CUDA machine, and verdicts to paste into an issue.

`checks` run one after the other in processes of their own, and return facts. `verdicts` compares these with the plan
(pure). All differences between devices are in `machine`, so that a rehearsal on the CPU runs the same checks.
"""
