"""From groups of rollouts to packed micro-batches: the road between actor and trainer.

Owns: reference log-probabilities, advantages, filters, the lag bound, aggregation weights and packing.
Consumes topic `actor` of its own replica in order; emits `training_data` (one partition per data-parallel rank) and
`preprocessor`. Every rollout that it reads is either packed for exactly one optimizer step or dropped with a reason.
Imports no torch: everything here is numpy on whole arrays.
"""
