"""Both ends of a weight update. Only `worker` and `twin` import vLLM.

Servers pull: the trainer's bytes go along a chain of all workers, and whoever loses its source goes on with another.

| end     | module     | owns                                                                            |
|---------|------------|---------------------------------------------------------------------------------|
| both    | `protocol` | what the request says: version, parameters, who pulls from whom; what the answer says |
| both    | `layout`   | where each parameter lies in one flat buffer                                    |
| both    | `wire`     | framed connections, authenticated by the run's secret                           |
| both    | `shelf`    | bytes that others may pull, while they are still coming in                      |
| both    | `giver`    | serves a shelf                                                                  |
| both    | `carriage` | how a bucket gets across: in the connection, NCCL, CUDA IPC                     |
| both    | `delta`    | lossless encoding of what changed since the previous version                    |
| both    | `digest`   | are the live tensors the bytes that were sent? checksum, and copies that loaders make |
| both    | `scores`   | question and answer of exact scoring                                            |
| trainer | `sender`   | `WeightSender`: snapshot, have all servers pull it, one supervising loop         |
| trainer | `supervision` | the loop in its thread                                                       |
| trainer | `snapshot` | the bytes of a version while somebody pulls them                                |
| trainer | `chain`    | who pulls from whom. Pure                                                       |
| trainer | `roster`   | the servers of the moment, each watched                                         |
| trainer | `member`   | one server: what it holds, what it serves                                       |
| trainer | `news`     | messages about who serves which version                                         |
| trainer | `probe`    | the text of the probe and the trainer's scores of version 0, in the run folder    |
| trainer | `attestation` | verdicts over log-probabilities: calibration, noise, changes. Pure              |
| trainer | `attestor` | asks servers beside generation: digest, scores; what is pushed again or given up |
| server  | `handover` | the server's process tells its workers to pull                                  |
| server  | `receiver` | receives into a staging buffer in the background, and gives to others           |
| server  | `taker`    | pulls one part from the nearest source that delivers                            |
| server  | `engines`  | makes `worker` known to vLLM                                                    |
| server  | `worker`   | vLLM's side: stage in the background, swap when told                            |
| server  | `twin`     | how staged tensors become the live model's                                      |
"""
