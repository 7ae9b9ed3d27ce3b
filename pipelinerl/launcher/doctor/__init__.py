"""`pipelinerl doctor`: what a domain rewards that it should not, found before a GPU is paid.

`policies` writes the answers of players that cannot or will not solve a problem. `play` lets them play the domain, with
a scripted model in place of a server. `findings` compares what they earned, and decides. Only `play` does I/O.
"""
