"""Coding problems, judged by running the program on tests in SandboxFusion or in the embedded sandbox."""

from pipelinerl.domains.coding.rollouts import generate_rollout, load_problems

__all__ = ["generate_rollout", "load_problems"]
