"""The inference server: vLLM's OpenAI-compatible server that takes weight updates in flight.

`args` (configuration → vLLM's arguments, pure), `server` (vLLM's application with our routes and guard), `control`
(the update transaction), `guard` (who may call what), `client` (exact scoring of given tokens).
"""
