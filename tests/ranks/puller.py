"""A server's end, run as a process by the transport tests.

It prints its port. After a line on stdin it pulls two versions and prints the digest of each.

python puller.py TRANSPORT PORT DEVICE NUM_BYTES BUCKET_BYTES
"""

import hashlib
import sys

import torch

from pipelinerl.weights.protocol import Address, ParamSpec, PayloadRange, WeightUpdateRequest
from pipelinerl.weights.transfer.receiver import Receiver

VERSIONS = 2


def main(transport: str, port: int, device: torch.device, num_bytes: int, bucket_bytes: int) -> None:
    receiver = Receiver(
        index=0,
        host="127.0.0.1",
        secret="x",
        device=device,
        allocate=lambda size: torch.zeros(size, dtype=torch.uint8, device=device),
        prepare=lambda layout, buffer: None,
    )
    print(receiver.address.port, flush=True)
    sys.stdin.readline()  # where there is a group, it is formed
    for version in range(VERSIONS):
        part = PayloadRange(start=0, end=num_bytes, sources=(Address("127.0.0.1", port),))
        request = WeightUpdateRequest(
            sender="s",
            version=version,
            params=(ParamSpec("w", "uint8", (num_bytes,)),),
            workers=((part,),),
            transport=transport,
            bucket_bytes=bucket_bytes,
            timeout_s=120,
            stall_s=30,
        )
        print(receiver.begin(request).reply(120), file=sys.stderr)
        assert transport != "nccl" or receiver.source_server.groups.over(Address("127.0.0.1", port)), "it came over TCP"
        print(hashlib.sha256(receiver.staged(version)[1].cpu().numpy()).hexdigest(), flush=True)
    receiver.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
