"""The preprocessor: turns the actor's groups of rollouts into packed micro-batches for the trainer, without torch.

Consumes topic `actor` of its own replica in order. Emits `training_data` (one partition per trainer rank) and
`preprocessor`. Every rollout is either packed for exactly one optimizer step or dropped with a reason.
"""
