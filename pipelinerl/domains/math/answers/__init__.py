"""Whether two answers in LaTeX mean the same. It imports nothing of the project.

In the order in which an answer meets them: ``tokens`` reads characters by the tables of ``forms``, ``parser`` makes
``trees`` of them, ``equality`` compares what they mean, with ``values`` of numbers, ``regions`` of the real line, and
``units`` of measurement. ``wording`` has the answers that are words or letters.
"""
