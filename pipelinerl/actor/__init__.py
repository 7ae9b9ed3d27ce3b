"""The actor turns problems into complete groups of rollouts.

In the actor process ``loop`` connects ``problems``, ``pacing``, ``groups``, ``evaluation`` and ``worker_pool``. In a
``worker`` process ``executor`` runs the rollouts, ``router`` carries their requests to ``servers``, and ``sequences``
turns a domain's result into a record.
"""
