"""`pipelinerl doctor`: find rewards that can be gamed, before a run.

`policies` writes the answers of players that cannot or will not solve a problem. `play` lets them play the domain, with
a scripted model in place of a server. `findings` compares their rewards. Only `play` does I/O.
"""
