"""Decides whether a server samples from the weights it was sent: its bytes, and its log-probabilities."""
