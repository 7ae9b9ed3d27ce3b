"""The actor: problems in, whole groups of rollouts out.

In the actor: ``problems`` chooses what comes next, ``lag`` when it may start, ``loop`` holds everything together,
``progress`` remembers what is settled, ``workers`` knows the worker processes. In a ``worker``: ``executor`` runs the
rollouts, ``transport`` carries their requests to ``servers``, ``sequences`` turns a domain's result into a record.
``connection`` is between the two.
"""
