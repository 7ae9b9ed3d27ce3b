"""The actor: problems in, whole groups of rollouts out.

``problems`` chooses what comes next, ``lag`` when it may start, ``workers`` and ``scheduler`` run it, ``sequences``
turns a domain's result into a record, ``progress`` remembers what is settled, ``loop`` holds them together.
"""
