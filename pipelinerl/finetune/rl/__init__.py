"""The objective: output head, losses, diagnostics. Pure functions of tensors, no processes and no files."""
