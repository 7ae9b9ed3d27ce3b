"""The actor turns problems into complete groups of rollouts.

In the actor process, ``problems`` chooses the next problem, by a permutation or by what ``sampling`` draws, and
``pacing`` decides when it may start. ``groups`` takes groups from dispatch to publication, and ``evaluation`` takes
evaluations. ``publish_gate`` holds back what the weight probes have not confirmed. ``work`` holds the task ids of both,
``worker_pool`` the worker processes. ``progress`` counts what was dispatched and finished, and saves it. ``resume``
goes on after a checkpoint, and ``loop`` connects them all.

In a ``worker`` process, ``executor`` runs the rollouts, ``router`` carries their requests to ``servers``, and
``sequences`` turns a domain's result into a record. ``connection`` links the actor and a worker.
"""
