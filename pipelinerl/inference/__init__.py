"""The inference server: vLLM's OpenAI-compatible server that takes weight updates in flight.

`args` turns the configuration into vLLM's arguments, as a pure function. `server` runs vLLM's application and our
routes. `access` decides who may call which route. `weight_update` carries out a weight update. `answers` is the lean
route for completions and `scoring` the one for log-probabilities of given tokens. `scheduler` extends vLLM's scheduler.
"""
