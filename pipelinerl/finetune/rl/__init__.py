"""The objective: output head, losses, diagnostics. Pure functions of tensors, no processes and no files.

What a loss of your own needs is here (docs/objectives.md):

>>> from pipelinerl.finetune.rl import PolicyTokens, TokenLoss, token_level
"""

from pipelinerl.finetune.rl.interface import PolicyTokens, TokenLoss, token_level

__all__ = ["PolicyTokens", "TokenLoss", "token_level"]
