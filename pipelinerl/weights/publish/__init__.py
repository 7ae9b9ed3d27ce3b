"""The trainer's end of weight updates: snapshots of the parameters, their delivery, and who serves which version."""
