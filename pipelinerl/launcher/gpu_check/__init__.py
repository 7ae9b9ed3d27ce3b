"""`pipelinerl gpu-check`: ten minutes on a CUDA machine, and verdicts to paste into an issue.

`__main__` runs the checks of `checks` one after the other, each in processes of its own with a deadline. They return
facts. `verdicts` compares the facts with the plan; it is pure. `machine` is the only module that knows what a device
is, so a rehearsal on the CPU runs the same checks.
"""
