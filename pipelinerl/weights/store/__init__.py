"""Weight versions as files in a shared folder or at any fsspec URL, for `weights.backend=store` (docs/weights.md).

`manifest` has the published versions, signed, `files` the durable files, `publisher` the trainer's bookkeeping.
`publish.store_delivery` publishes versions here, `load.store_follower` has a server take them.
"""
