"""Both ends of a weight update. Only `worker` and `twin` import vLLM.

Servers pull the bytes. Each trainer rank has a stripe of them, which passes along a chain of all workers. A worker of
several pulls its shard only, from workers with the same one. A worker that loses its source continues with another one.
Or the ranks write files, which servers fetch (`store`).

| end     | module     | owns                                                                            |
|---------|------------|---------------------------------------------------------------------------------|
| both    | `protocol` | messages: update request (version, parameters, sources of each worker) and answer |
| both    | `layout`   | the place of each parameter in one flat buffer                                  |
| both    | `wire`     | framed connections, authenticated by the run's secret                           |
| both    | `shelf`    | bytes that others may pull, also while they are still arriving                  |
| both    | `giver`    | serves a shelf to those who pull                                                |
| both    | `carriage` | transport of a bucket: in the connection, NCCL, CUDA IPC                        |
| both    | `delta`    | lossless encoding of the changes since the previous version                     |
| both    | `digest`   | checks that the live tensors are the sent bytes: checksum, and copies that loaders make |
| both    | `shard`    | the part of a version that one worker keeps, learned from loaders. Pure         |
| both    | `gathering` | bytes and checksums of a shard, out of a version                               |
| both    | `scores`   | request and answer of exact scoring                                             |
| trainer | `origin`   | `Origin`: on every rank, takes the rank's stripe of a version and serves it        |
| trainer | `sender`   | `WeightSender`: on rank 0, has versions delivered, in one supervising loop        |
| trainer | `delivery` | how: has the servers pull. The other way is `store.delivery`                      |
| trainer | `supervision` | that loop in its thread                                                      |
| trainer | `plan`     | how the next version is taken: what is kept, whether it is encoded as a difference |
| trainer | `ranks`    | on rank 0, what the other ranks say about their stripes                         |
| trainer | `snapshot` | a rank's stripe of a version while servers pull it                              |
| trainer | `offer`    | a version, where its stripes are, and which servers pull it                     |
| trainer | `chain`    | the sources of each worker. Pure                                                |
| trainer | `roster`   | the current servers, and a watch on each                                        |
| trainer | `member`   | one server: the version it holds and the version it serves                      |
| trainer | `news`     | messages about which server serves which version                                |
| trainer | `probe`    | the text of the probe and the trainer's scores of version 0, in the run folder    |
| trainer | `attestation` | verdicts over log-probabilities: calibration, noise, changes. Pure              |
| trainer | `attestor` | checks digests and scores of servers during generation, reports failures        |
| server  | `handover` | the server's process tells its workers to pull                                  |
| server  | `receiver` | receives into a staging buffer in the background, and gives to others           |
| server  | `taker`    | pulls one part from the nearest source that delivers                            |
| server  | `engines`  | registers `worker` with vLLM                                                    |
| server  | `worker`   | vLLM's side: stages in the background, swaps on request                         |
| server  | `twin`     | puts staged tensors into the live model                                         |
| server  | `small_layers` | CPU: which layers vLLM does not pack                                        |
"""
