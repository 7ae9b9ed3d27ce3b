"""The way of a new version of the weights from the optimizer into the servers' live models (docs/weights.md).

`publish` is the trainer's end, `load` the end in vLLM's workers, `transfer` moves bytes between processes, `verify`
decides whether a server uses what it was sent, `store` keeps versions as files. All stand on `protocol` (the messages)
and `layout` (the place of each parameter in one flat buffer). publish → verify, transfer, store. load → transfer →
store. Only `load.worker`, `load.swap` and `load.adapter` import vLLM when they are imported.
"""
