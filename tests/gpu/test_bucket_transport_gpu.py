"""Bucket transports that need CUDA: bytes pulled by another process, over one GPU (IPC, NCCL) and over two (NCCL).

The rehearsal on the CPU sends the same bytes over TCP.
"""

import hashlib
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.one_card.world import ENVIRONMENT
from pipelinerl.weights.protocol import Address
from pipelinerl.weights.publish.nccl_groups import GroupPlan, NcclGroups
from pipelinerl.weights.transfer.buffers import BufferRegistry
from pipelinerl.weights.transfer.source import SourceServer
from tests.engine_runs import ROOT
from tests.gpu.device import DEVICE, needs_kernels

NUM_BYTES, BUCKET_BYTES = 3 << 20, 1 << 20
PULLER = ROOT / "tests" / "ranks" / "puller.py"


def hand_over(transport: str, giver: torch.device, receiver: torch.device, **child_env: str) -> None:
    registry, digests = BufferRegistry(), []
    for version in range(2):
        generator = torch.Generator().manual_seed(version)
        sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator)
        registry.put(f"s/{version}", sent.pin_memory() if giver.type == "cuda" else sent)
        digests.append(hashlib.sha256(sent.numpy()).hexdigest())
    source = SourceServer(registry, secret="x", host="127.0.0.1", device=giver)
    arguments = [transport, *(str(value) for value in (source.address.port, receiver, NUM_BYTES, BUCKET_BYTES))]
    command, env = [sys.executable, str(PULLER), *arguments], os.environ | child_env | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        puller = Address("127.0.0.1", int(child.stdout.readline()))
        groups = NcclGroups(source.groups, "s", "x", stall_s=120)
        if transport == "nccl":
            groups.bring([GroupPlan((source.address,), (puller,))])
        received, _ = child.communicate("\n", timeout=300)
        groups.close()
    source.close()
    assert received.split() == digests
    assert child.returncode == 0


@pytest.mark.gpu
def test_every_byte_reaches_another_process_on_the_same_device() -> None:
    device = torch.device("cuda:0") if DEVICE.type == "cuda" else DEVICE
    hand_over("ipc" if device.type == "cuda" else "tcp", device, device)


@pytest.mark.gpu
@needs_kernels
def test_nccl_hands_every_byte_to_another_process_on_the_same_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes the two ends for two hosts. The module has a process of its own, and this is its first use of NCCL."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    hand_over("nccl", torch.device("cuda:0"), torch.device("cuda:0"), NCCL_HOSTID="another part of the card")


@pytest.mark.multi_gpu
def test_nccl_hands_every_byte_to_another_gpu() -> None:
    hand_over("nccl", torch.device("cuda:0"), torch.device("cuda:1"))
