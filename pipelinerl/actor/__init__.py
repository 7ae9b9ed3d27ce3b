"""The actor: problems in, whole groups of rollouts out.

In the actor: ``problems`` chooses what comes next, ``lag`` when it may start; ``training`` carries groups from dispatch
to publication, ``evaluator`` evaluations; ``work`` holds the tickets of both, ``workers`` knows the worker processes,
``progress`` remembers what is settled, ``journal`` writes it, ``loop`` connects them.

In a ``worker``: ``executor`` runs the rollouts, ``transport`` carries their requests to ``servers``, ``sequences``
turns a domain's result into a record. ``connection`` is between the two.
"""
