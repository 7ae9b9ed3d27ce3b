"""The bytes of one parameter, for the baseline that moves one tensor at a time."""

import torch


def view_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor's memory as flat uint8."""
    return tensor.view(-1).view(torch.uint8)
