"""Tasks to train on. A domain is two functions, ``load_problems`` and ``generate_rollout``, on the public API."""
