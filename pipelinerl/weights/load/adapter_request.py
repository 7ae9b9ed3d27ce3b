"""What every request of a LoRA run's server runs with, apart from `adapter`, whose imports the API's process saves."""

from vllm.lora.request import LoRARequest

ADAPTER = LoRARequest("adapter", 1, "trainer")
"""It is never read from its path."""
