"""The actor turns problems into complete groups of rollouts.

In the actor process, ``problems`` chooses the next problem and ``lag`` decides when it may start. ``training`` takes
groups from dispatch to publication, and ``evaluator`` does the same for evaluations. ``work`` holds the tickets of
both. ``workers`` manages the worker processes. ``progress`` records which dispatches are settled, ``journal`` writes
that to disk, and ``loop`` connects them all.

In a ``worker`` process, ``executor`` runs the rollouts, ``transport`` carries their requests to ``servers``, and
``sequences`` turns a domain's result into a record. ``connection`` links the actor and a worker.
"""
