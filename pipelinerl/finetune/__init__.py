"""The trainer: micro-batches in, optimizer steps and weight versions out."""
