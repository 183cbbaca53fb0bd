import os
import platform
import subprocess
import sys

import pytest
import torch

from nanovllm_kernels.platform import (
    MIN_WIDE_HIDDEN_SIZE,
    describe_arithmetic,
    describe_device,
    has_cuda,
    is_intel,
    prefers_packed_bf16,
    residual_dtype,
)

MODULES = (
    "attention",
    "collective",
    "elementwise",
    "fp8",
    "gemm",
    "benchmarks",
    "platform",
    "request_tables",
    "sampling",
)


def test_cpu_description_has_no_gpu_properties():
    info = describe_device(torch.device("cpu"))
    assert (info.name, info.capability, info.num_sms, info.total_memory) == ("cpu", None, 0, 0)


def test_gpu_description_has_gpu_properties():
    if has_cuda():
        info = describe_device(torch.device("cuda"))
        assert info.capability >= (8, 0)
        assert info.num_sms > 0
        assert info.total_memory > 1 << 30
    else:
        assert not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0)


def test_residual_is_float32_where_that_is_free():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert residual_dtype(dtype, cuda, MIN_WIDE_HIDDEN_SIZE) == dtype
        assert residual_dtype(dtype, cuda, MIN_WIDE_HIDDEN_SIZE - 1) == torch.float32
    assert residual_dtype(torch.bfloat16, cpu, 8192) == torch.float32
    assert residual_dtype(torch.float16, cpu, 8192) == torch.float16


def test_arithmetic_names_detected_instructions(monkeypatch):
    cpu = torch.device("cpu")
    assert describe_arithmetic(torch.device("cuda"), torch.bfloat16) == "bfloat16"
    assert describe_arithmetic(cpu, torch.float32).startswith("float32, ")
    found = describe_arithmetic(cpu, torch.bfloat16)
    assert found.startswith("bfloat16, " if prefers_packed_bf16() else "float32 from bfloat16 weights, ")
    monkeypatch.setattr("nanovllm_kernels.platform.prefers_packed_bf16", lambda: False)
    assert describe_arithmetic(cpu, torch.bfloat16).startswith("float32 from bfloat16 weights, ")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN's limit names instructions of x86")
def test_onednn_instruction_limit_disables_bf16_packing():
    program = "from nanovllm_kernels.platform import prefers_packed_bf16; print(prefers_packed_bf16())"
    # Intel's AVX-512 bf16 instructions without AMX are slower than float32.
    slow_limits = ("AVX512_CORE_BF16",) if is_intel() else ()
    for limit in ("AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", *slow_limits):
        limited = os.environ | {"ONEDNN_MAX_CPU_ISA": limit}
        done = subprocess.run([sys.executable, "-c", program], env=limited, capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"


def test_import_and_cpu_use_do_not_import_triton():
    imports = "; ".join(f"import nanovllm_kernels.{module}" for module in MODULES)
    run = "nanovllm_kernels.elementwise.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-5)"
    program = f"import sys, torch, nanovllm_kernels; {imports}; {run}; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
