"""What the package says of this machine, and what importing it costs."""

import subprocess
import sys

import torch

from nanovllm_kernels.platform import NARROW, describe, has_cuda, residual_dtype

ROOMS = ("attention", "batch", "elementwise", "fp8", "gemm", "ladder", "platform", "sampling")


def test_a_cpu_has_no_gpu_numbers():
    info = describe(torch.device("cpu"))
    assert (info.name, info.capability, info.num_sms, info.total_memory) == ("cpu", None, 0, 0)


def test_a_gpu_is_described():
    if has_cuda():
        info = describe(torch.device("cuda"))
        assert info.capability >= (8, 0)
        assert info.num_sms > 0
        assert info.total_memory > 1 << 30
    else:
        assert not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0)


def test_the_residual_is_widened_where_that_costs_nothing():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert residual_dtype(dtype, cuda, NARROW) == dtype
        assert residual_dtype(dtype, cuda, NARROW - 1) == torch.float32
    assert residual_dtype(torch.bfloat16, cpu, 8192) == torch.float32
    assert residual_dtype(torch.float16, cpu, 8192) == torch.float16


def test_importing_and_running_on_a_cpu_takes_no_kernel_language():
    imports = "; ".join(f"import nanovllm_kernels.{room}" for room in ROOMS)
    run = "nanovllm_kernels.elementwise.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)"
    program = f"import sys, torch, nanovllm_kernels; {imports}; {run}; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
