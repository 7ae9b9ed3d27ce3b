"""Builds a ~0.1M-parameter model on the spot, so that a run needs no download and no GPU.

A *recipe* names the tokenizer's whole tokens and draws warm-up conversations. The warm-up teaches the OUTPUT FORMAT of
a task and the meaning of its words, never the task, which is left to reinforcement learning. The same ``(recipe, seed,
params)`` gives the same bytes. A folder appears whole, by one rename, or not at all.
"""

from pipelinerl.tiny_model.builder import build
from pipelinerl.tiny_model.recipes import RECIPES, Recipe

__all__ = ["RECIPES", "Recipe", "build"]
