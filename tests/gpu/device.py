"""The device of the GPU tests. `PIPELINERL_GPU_TESTS_ON=cpu` rehearses them where there is no GPU."""

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("PIPELINERL_GPU_TESTS_ON", "cuda"))
needs_kernels = pytest.mark.skipif(DEVICE.type == "cpu", reason="runs a kernel, or at a size, that only GPUs have")
