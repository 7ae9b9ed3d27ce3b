"""How a new version of the weights comes from the optimizer into the servers' live models.

A version is cut into stripes, one per trainer rank. At the end of an optimizer step every rank copies its stripe out of
the parameters (`publish.origin`, `publish.snapshot`) and serves it from a listener of its own (`transfer.source`). Rank
0 offers the version to the servers (`publish.sender`, `publish.delivery`): one HTTP request each, which names the
sources of each worker, nearest first (`transfer.chain`). The server's process hands the request to its workers
(`transfer.handover`). Each pulls the bytes, or its shard of them, into a staging buffer while the engine goes on
decoding (`transfer.puller`, `transfer.receiver`), and passes them on to the next while they come in. Then the engine
swaps between two steps: the worker copies the staged bytes into the live model (`load.worker`, `load.swap`). The
server answers, the trainer announces which server serves which version (`publish.announcements`), and checks that the
live tensors are the sent bytes and that the log-probabilities are its own (`load.live_check`,
`verify.checker`). With `weights.backend=store` the ranks write files instead (`store`), and the servers fetch them by
themselves (`load.store_follower`).

Five folders stand on `protocol` (the messages) and `layout` (the place of each parameter in one flat buffer). `publish`
is the trainer's end, `load` the end in vLLM's workers, `transfer` moves bytes between processes, `verify` decides
whether a server uses what it was sent, `store` keeps versions as files. publish → verify, transfer, store. load →
transfer → store. Only `load.worker`, `load.swap` and `load.adapter` import vLLM when they are imported.

Where a LoRA run sends its adapter alone, the version is the adapter, and the live model is its places (`load.adapter`).
"""
