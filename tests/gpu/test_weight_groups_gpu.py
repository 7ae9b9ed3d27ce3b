"""Transfer groups that need CUDA: bytes handed over between two processes, over one GPU (IPC) and over two (NCCL)."""

import subprocess
import sys
import time

import pytest
import torch
from pipelinerl.weights.group import host_store, join

from pipelinerl.weights.layout import buckets
from pipelinerl.weights.protocol import GroupSpec

NUM_BYTES, BUCKET_BYTES = 3 << 20, 1 << 20
CHILD = """
import sys, time, hashlib
import torch
from pipelinerl.weights.group import connect
from pipelinerl.weights.layout import buckets
from pipelinerl.weights.protocol import GroupSpec
backend, port, device = sys.argv[1], int(sys.argv[2]), torch.device(sys.argv[3])
torch.cuda.set_device(device)
spec = GroupSpec(backend=backend, host="127.0.0.1", port=port, name="g", world_size=2, is_new=True)
deadline = time.monotonic() + 120
group = connect(spec, 1, device, deadline, lambda: None)
buffer = torch.zeros(int(sys.argv[4]), dtype=torch.uint8, device=device)
for _ in range(2):
    for bucket in buckets(buffer, int(sys.argv[5])):
        group.broadcast(bucket, deadline, lambda: None)
    torch.cuda.synchronize()
    print(hashlib.sha256(buffer.cpu().numpy()).hexdigest(), flush=True)
"""


def hand_over(backend: str, receiver_device: str) -> None:
    import hashlib

    store = host_store("127.0.0.1", 0, 120)
    command = [
        sys.executable,
        "-c",
        CHILD,
        backend,
        str(store.port),
        receiver_device,
        str(NUM_BYTES),
        str(BUCKET_BYTES),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        spec = GroupSpec(backend=backend, host="127.0.0.1", port=store.port, name="g", world_size=2, is_new=True)  # type: ignore[arg-type]
        deadline = time.monotonic() + 120
        group = join(store, spec, 0, torch.device("cuda:0"), deadline, lambda: None)
        assert child.stdout is not None
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, generator=generator).pin_memory()
            for bucket in buckets(sent, BUCKET_BYTES):
                group.broadcast(bucket, deadline, lambda: None)
            assert child.stdout.readline().strip() == hashlib.sha256(sent.numpy()).hexdigest()
    assert child.returncode == 0


@pytest.mark.gpu
def test_ipc_hands_every_byte_to_another_process_on_the_same_gpu() -> None:
    hand_over("ipc", "cuda:0")


@pytest.mark.multi_gpu
def test_nccl_broadcasts_every_byte_to_another_gpu() -> None:
    hand_over("nccl", "cuda:1")
