"""The end of weight updates in vLLM's processes: staged bytes become the live model, and are compared with it."""
