"""What a device can do. The one place that asks; everything else branches on the answer.

This room must not know any operator.
"""

import ctypes
import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# The architecture that FlashAttention was seen to work on here: Hopper.
FLASH_ATTENTION_MAJOR = 9
MIN_CAPABILITY = (8, 0)
# Up to so many rows are computed in float32 on any CPU: see `gemm`.
FEW_ROWS = 8
# Models of a smaller hidden size are decoded in the time of their launches, not of their residual stream.
NARROW = 1024
# Values of ONEDNN_MAX_CPU_ISA under which oneDNN emulates products of bf16.
_ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """One device.

    capability: CUDA compute capability, None on a CPU. total_memory: bytes, 0 where the device doesn't say (a CPU).
    num_sms: streaming multiprocessors, 0 on a CPU. has_triton: whether triton can be imported, that is, whether its
    kernels can be compiled for this machine.
    """

    name: str
    capability: tuple[int, int] | None
    total_memory: int
    num_sms: int
    has_triton: bool


@functools.cache
def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU that the kernels run on (Ampere or newer)."""
    return torch.version.cuda is not None and torch.cuda.is_available() and _capability() >= MIN_CAPABILITY


def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability()


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed. Doesn't import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_flash_attention() -> bool:
    """Whether FlashAttention's CuTe build is installed and made for this machine's GPU. Doesn't import it."""
    return (
        has_cuda()
        and _capability()[0] == FLASH_ATTENTION_MAJOR
        and importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


@functools.cache
def has_cute() -> bool:
    """Whether CuTe DSL is installed and this machine's GPU is the one that our kernels in it are made for."""
    return has_cuda() and _capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None


@functools.cache
def has_fp8() -> bool:
    """Whether this machine's GPU turns e4m3 into other numbers and back: Ada, Hopper and newer."""
    return has_cuda() and _capability() >= (8, 9)


@functools.cache
def describe(device: torch.device) -> DeviceInfo:
    """What `device` is and can do. Raises RuntimeError for a CUDA device that isn't there."""
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


def kept_directory(name: str) -> Path | None:
    """A directory of that name for what a compiler makes, which outlives the machine's next start: in $NANOVLLM_CACHE,
    else the user's cache directory. None if no such place can be written to.
    """
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        directory = Path(os.environ.get("NANOVLLM_CACHE") or Path(home) / "nanovllm") / name
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory


def residual_dtype(dtype: torch.dtype, device: torch.device, hidden_size: int) -> torch.dtype:
    """The dtype of the residual stream, [T, hidden_size], of a model with weights of `dtype` on `device`.

    A bf16 stream is rounded twice a layer, and two tokens' logits are often nearer than the error that comes of it; a
    float16 one overflows where a model has one of its few very large numbers. So beside weights of 16 bits it is
    float32 where that costs nothing: for a narrow model on CUDA; and beside bf16 on a CPU, where norms and products of
    few rows, which are computed in float32 anyway, would convert it back and forth.
    """
    widens = dtype == torch.bfloat16 if device.type == "cpu" else dtype.itemsize == 2 and hidden_size < NARROW
    return torch.float32 if widens else dtype


@functools.cache
def can_overlap_launches(device: torch.device) -> bool:
    """Whether a kernel here may begin while the one ahead of it drains (programmatic dependent launch: Hopper on)."""
    capability = describe(device).capability
    return capability is not None and capability >= (9, 0)


@functools.cache
def can_pack_bf16() -> bool:
    """Whether oneDNN on this CPU multiplies bfloat16 natively, so that prepacked weights pay (see `gemm`)."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - torch has no public name for the probe
        and _bf16_unit() is not None
    )


def _bf16_unit() -> str | None:
    """The instructions by which oneDNN multiplies bf16 here, None where it would emulate them.

    On x86 torch's own probe takes AVX-512 alone for support, and names no instructions.
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
    """Whether kernels in Numba run here: it is installed, and torch computes with threads that they can use, those of
    OpenMP as GCC calls it. Doesn't import it.
    """
    found = sys.platform == "linux" and importlib.util.find_spec("numba") is not None
    return found and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def runs_in_float32(num_rows: int) -> bool:
    """Whether so many rows beside bf16 weights are computed in float32 on a CPU, by kernels in Numba.

    Few always are. Without instructions for bf16 all are.
    """
    return has_numba() and num_rows > 0 and (num_rows <= FEW_ROWS or not can_pack_bf16())


def describe_arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """How products of a model with weights of `dtype` are computed on `device`, for people."""
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return name
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype != torch.bfloat16:
        return f"{name}, {capability} (torch)"
    in_float32 = f"float32 from bfloat16 weights, {capability} (torch)"
    if has_numba():
        from nanovllm_kernels.jit import INSTRUCTIONS

        in_float32 = f"float32 from bfloat16 weights, {INSTRUCTIONS} (Numba)"
    if not can_pack_bf16():
        return in_float32
    native = f"bfloat16, {_bf16_unit()} (oneDNN)"
    return f"{native}; up to {FEW_ROWS} tokens {in_float32}" if has_numba() else native
