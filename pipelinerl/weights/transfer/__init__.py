"""Moves the bytes of a version between processes that hold weights: the trainer's ranks and the servers' workers."""
