"""The preprocessor: turns the actor's groups of rollouts into packed micro-batches for the trainer.

Owns: reference log-probabilities, advantages, filters, `lag_drop`, aggregation weights and packing.
Consumes topic `actor` of its own replica in order. Emits `training_data` (one partition per trainer rank) and
`preprocessor`. Every rollout that it reads is either packed for exactly one optimizer step or dropped with a reason.
It does not import torch. All computation is numpy on whole arrays.
"""
