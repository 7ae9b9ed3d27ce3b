"""Both ends of a weight update, side by side. Only `worker` and `twin` import vLLM.

| end     | module     | owns                                                                            |
|---------|------------|---------------------------------------------------------------------------------|
| both    | `protocol` | what the request says: version, parameters, group; and what the answer says     |
| both    | `layout`   | where each parameter lies in one flat buffer, and the buckets the buffer is cut into |
| both    | `group`    | the transfer group of the trainer and ONE server: Gloo, NCCL or CUDA IPC           |
| both    | `delta`    | lossless encoding of what changed since the previous version                    |
| both    | `digest`   | are the live tensors the bytes that were sent? checksum, and copies that loaders make |
| both    | `scores`   | question and answer of exact scoring                                            |
| trainer | `names`    | from the trained module's parameters to the checkpoint's names                  |
| trainer | `sender`   | `WeightSender`: snapshot, push to all servers in parallel, report               |
| trainer | `probe`    | the text of the probe and the trainer's scores of version 0, in the run folder    |
| trainer | `attestation` | verdicts over log-probabilities: calibration, noise, changes. Pure              |
| trainer | `attestor` | asks servers beside generation: digest, scores; what is pushed again or given up |
| server  | `receiver` | receives into staging buffers in a background thread                            |
| server  | `engines`  | makes `worker` known to vLLM                                                    |
| server  | `worker`   | vLLM's side: stage in the background, swap when told                            |
| server  | `twin`     | how staged tensors become the live model's                                      |
"""
