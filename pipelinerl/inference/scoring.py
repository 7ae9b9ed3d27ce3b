"""Worker side of a server that scores: at the temperature at which the policy samples, with or without updates."""

from typing import Any

from vllm.model_executor.layers.logits_processor import LogitsProcessor

from pipelinerl.weights.load.worker import WeightUpdateExtension


class ScoreExtension:
    """Methods that vLLM mixes into its worker (``--worker-extension-cls``). Called through ``collective_rpc``."""

    model_runner: Any

    def score_at_temperature(self, temperature: float) -> None:
        """Scale all logits once and for all: vLLM's prompt log-probabilities know no temperature.

        Raises:
            RuntimeError: the model computes its logits in a way that takes no scale.
        """
        processors = [
            module for module in self.model_runner.get_model().modules() if isinstance(module, LogitsProcessor)
        ]
        if temperature != 1.0 and not processors:
            raise RuntimeError("the reference model has no LogitsProcessor: set the sampling temperature to 1")
        for processor in processors:
            processor.scale /= temperature


class FollowingScoreExtension(ScoreExtension, WeightUpdateExtension):
    """For a teacher that is an average of the policy."""
