"""Tasks to train on. A domain is two functions: ``load_problems`` and ``generate_rollout``; it imports only the public API."""
