"""Detects what a device can do. Other modules branch on the answers and never ask the device themselves."""

import ctypes
import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# Major compute capability on which FlashAttention is known to work: Hopper.
FLASH_ATTENTION_MAJOR = 9
MIN_CAPABILITY = (8, 0)
# Number of SMs that launches are planned for without a GPU, in the interpreter.
INTERPRETER_SMS = 8
# Maximum number of rows that every CPU computes in float32, see `gemm`.
MAX_FLOAT32_ROWS = 8
# Below this hidden size, launches limit the speed of decodes, so that a float32 residual stream costs nothing.
MIN_WIDE_HIDDEN_SIZE = 1024
# Values of ONEDNN_MAX_CPU_ISA under which oneDNN emulates bf16 products.
_ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device.

    capability: CUDA compute capability, None on a CPU.
    total_memory: bytes, 0 on a CPU.
    num_sms: streaming multiprocessors, 0 on a CPU.
    has_triton: whether Triton is installed, so that its kernels can be compiled.
    """

    name: str
    capability: tuple[int, int] | None
    total_memory: int
    num_sms: int
    has_triton: bool


@functools.cache
def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU that the kernels support (Ampere or newer)."""
    return torch.version.cuda is not None and torch.cuda.is_available() and _capability() >= MIN_CAPABILITY


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_flash_attention() -> bool:
    """Whether FlashAttention's CuTe build is installed and supports this machine's GPU. Does not import it."""
    return (
        has_cuda()
        and _capability()[0] == FLASH_ATTENTION_MAJOR
        and importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


@functools.cache
def has_cute() -> bool:
    """Whether CuTe DSL is installed and this machine's GPU is Hopper, for which our CuTe kernels are written."""
    return has_cuda() and _capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None


@functools.cache
def has_fp8() -> bool:
    """Whether this machine's GPU converts to and from e4m3: Ada, Hopper or newer."""
    return has_cuda() and _capability() >= (8, 9)


@functools.cache
def describe_device(device: torch.device) -> DeviceInfo:
    """Return the properties of `device`. Raises RuntimeError for a CUDA device that does not exist."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            name=properties.name,
            capability=(properties.major, properties.minor),
            total_memory=properties.total_memory,
            num_sms=properties.multi_processor_count,
            has_triton=has_triton(),
        )
    return DeviceInfo(name=device.type, capability=None, total_memory=0, num_sms=0, has_triton=has_triton())


def make_cache_directory(name: str) -> Path | None:
    """Create and return a persistent directory for a compiler's output, or None if none is writable.

    The directory is in $NANOVLLM_CACHE, else in the user's cache directory.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        directory = Path(os.environ.get("NANOVLLM_CACHE") or Path(home) / "nanovllm") / name
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory


def residual_dtype(dtype: torch.dtype, device: torch.device, hidden_size: int) -> torch.dtype:
    """Return the dtype of the residual stream [T, hidden_size] of a model with weights of `dtype` on `device`.

    16-bit streams are inexact. bf16 rounds twice per layer, often by more than the difference of two logits. float16
    overflows on outliers of a few models. So models with 16-bit weights get a float32 stream where that is free: narrow
    models on CUDA, and bf16 on a CPU, where norms and few-row products run in float32 anyway.
    """
    uses_float32 = (
        dtype == torch.bfloat16 if device.type == "cpu" else dtype.itemsize == 2 and hidden_size < MIN_WIDE_HIDDEN_SIZE
    )
    return torch.float32 if uses_float32 else dtype


@functools.cache
def can_overlap_launches(device: torch.device) -> bool:
    """Whether a kernel can start while the previous one drains (programmatic dependent launch: Hopper or newer)."""
    capability = describe_device(device).capability
    return capability is not None and capability >= (9, 0)


@functools.cache
def can_pack_bf16() -> bool:
    """Whether oneDNN on this CPU multiplies bfloat16 natively, so that prepacking pays (see `gemm`)."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - torch has no public name for the probe
        and _bf16_instructions() is not None
    )


def _bf16_instructions() -> str | None:
    """Return the name of the instructions with which oneDNN multiplies bf16, or None if it would emulate them.

    torch's own probe is not enough: on x86 it accepts AVX-512 alone.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return "BF16"
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    if limit in _ISA_WITHOUT_BF16:
        return None
    cpu = torch.cpu
    if cpu._is_amx_tile_supported() and "AMX" in (limit if limit.startswith("AVX") else "AMX"):  # noqa: SLF001
        return "AMX"
    return "AVX-512 BF16" if cpu._is_avx512_bf16_supported() else None  # noqa: SLF001


@functools.cache
def has_numba() -> bool:
    """Whether Numba kernels run here: Numba is installed, and torch uses GCC's OpenMP. Does not import Numba."""
    is_installed = sys.platform == "linux" and importlib.util.find_spec("numba") is not None
    return is_installed and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def runs_in_float32(num_rows: int) -> bool:
    """Whether a CPU computes `num_rows` rows with bf16 weights in float32, with Numba kernels.

    True for few rows, and for any number on a CPU without bf16 instructions.
    """
    return has_numba() and num_rows > 0 and (num_rows <= MAX_FLOAT32_ROWS or not can_pack_bf16())


def describe_arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """Describe, for users, how a model with weights of `dtype` computes products on `device`."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return name
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype != torch.bfloat16:
        return f"{name}, {capability} (torch)"
    in_float32 = f"float32 from bfloat16 weights, {capability} (torch)"
    if has_numba():
        from nanovllm_kernels.numba_jit import VECTOR_INSTRUCTIONS

        in_float32 = f"float32 from bfloat16 weights, {VECTOR_INSTRUCTIONS} (Numba)"
    if not can_pack_bf16():
        return in_float32
    native = f"bfloat16, {_bf16_instructions()} (oneDNN)"
    return f"{native}; up to {MAX_FLOAT32_ROWS} tokens {in_float32}" if has_numba() else native
