"""Bucket transports that need CUDA: bytes pulled by another process, over one GPU (IPC) and over two (NCCL)."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.nccl_groups import GroupPlan, NcclGroups
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.source import SourceServer

NUM_BYTES, BUCKET_BYTES = 3 << 20, 1 << 20
CHILD = """
import hashlib, sys
import torch
from pipelinerl.weights.protocol import Address, ParamSpec, PayloadRange, WeightUpdateRequest
from pipelinerl.weights.transfer.receiver import Receiver
transport, port, device, num_bytes = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3]), int(sys.argv[4])
receiver = Receiver(
    index=0, host="127.0.0.1", secret="x", device=device,
    allocate=lambda size: torch.zeros(size, dtype=torch.uint8, device=device), prepare=lambda layout, buffer: None,
)
print(receiver.address.port, flush=True)
sys.stdin.readline()  # the group is formed
for version in range(2):
    part = PayloadRange(start=0, end=num_bytes, sources=(Address("127.0.0.1", port),))
    transfer = receiver.begin(WeightUpdateRequest(
        sender="s", version=version, params=(ParamSpec("w", "uint8", (num_bytes,)),), workers=((part,),),
        transport=transport, bucket_bytes=int(sys.argv[5]), timeout_s=120, stall_s=30,
    ))
    print(transfer.reply(120), file=sys.stderr)
    assert transport != "nccl" or receiver.source_server.groups.over(Address("127.0.0.1", port)), "it came over TCP"
    print(hashlib.sha256(receiver.staged(version)[1].cpu().numpy()).hexdigest(), flush=True)
receiver.close()
"""


def hand_over(transport: str, receiver_device: str) -> None:
    registry, digests = BufferRegistry(), []
    for version in range(2):
        generator = torch.Generator().manual_seed(version)
        sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator).pin_memory()
        registry.put(f"s/{version}", sent)
        digests.append(hashlib.sha256(sent.numpy()).hexdigest())
    source_server = SourceServer(registry, secret="x", host="127.0.0.1", device=torch.device("cuda:0"))
    numbers = [str(number) for number in (source_server.address.port, receiver_device, NUM_BYTES, BUCKET_BYTES)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CHILD, transport, *numbers]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        puller = Address("127.0.0.1", int(child.stdout.readline()))
        groups = NcclGroups(source_server.groups, "s", "x", stall_s=120)
        if transport == "nccl":
            groups.bring([GroupPlan((source_server.address,), (puller,))])
        received, _ = child.communicate("\n", timeout=300)
        groups.close()
    source_server.close()
    assert received.split() == digests
    assert child.returncode == 0


@pytest.mark.gpu
def test_ipc_hands_every_byte_to_another_process_on_the_same_gpu() -> None:
    hand_over("ipc", "cuda:0")


@pytest.mark.multi_gpu
def test_nccl_hands_every_byte_to_another_gpu() -> None:
    hand_over("nccl", "cuda:1")
