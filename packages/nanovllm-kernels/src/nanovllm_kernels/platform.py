"""Detects what a device can do. Other modules do not query devices themselves."""

import ctypes
import functools
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

# Only GPUs with this major compute capability (Hopper) use FlashAttention.
FLASH_ATTENTION_MAJOR = 9
MIN_CAPABILITY = (8, 0)  # Ampere
# Number of SMs that launches assume in Triton's interpreter, which reports 0 SMs.
INTERPRETER_SMS = 8
# On a CPU with bf16 instructions, Numba kernels multiply in float32 if there are at most this number of rows.
MAX_FLOAT32_ROWS = 8
# Below this hidden size, kernel launches limit the speed of decodes, so a float32 residual stream costs no time.
MIN_WIDE_HIDDEN_SIZE = 1024
# Values of ONEDNN_MAX_CPU_ISA under which oneDNN emulates bf16 products.
_ISA_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a device. On a CPU `capability` is None, and `total_memory` (in bytes) and `num_sms` are 0."""

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
    """Whether Triton is installed. Does not import Triton."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def has_flash_attention() -> bool:
    """Whether FlashAttention's CuTe build is installed and supports this machine's GPU. Does not import the build."""
    return (
        has_cuda()
        and _capability()[0] == FLASH_ATTENTION_MAJOR
        and importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


@functools.cache
def has_cute() -> bool:
    """Whether CuTe DSL is installed and this machine's GPU is Hopper. Our CuTe kernels support only Hopper."""
    return has_cuda() and _capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None


@functools.cache
def has_fp8() -> bool:
    """Whether this machine's GPU converts to and from e4m3: Ada, Hopper or newer."""
    return has_cuda() and _capability() >= (8, 9)


@functools.cache
def describe_device(device: torch.device) -> DeviceInfo:
    """Return the properties of `device`. Raises RuntimeError if a CUDA device does not exist."""
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
    """Create directory `name`, for compiled code. Returns None if that fails.

    The directory is in $NANOVLLM_CACHE or, if this variable is not set, in `nanovllm` in the user's cache directory.
    """
    try:
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
        directory = Path(os.environ.get("NANOVLLM_CACHE") or Path(user_cache) / "nanovllm") / name
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    return directory


def residual_dtype(dtype: torch.dtype, device: torch.device, hidden_size: int) -> torch.dtype:
    """Return the dtype of the residual stream [T, hidden_size] of a model with weights of `dtype` on `device`.

    The stream is float32 if that costs no time: for narrow models on CUDA, and for bf16 on a CPU. A bf16 stream rounds
    twice per layer. The errors often exceed the difference of the two largest logits. A float16 stream may overflow.
    """
    uses_float32 = (
        dtype == torch.bfloat16 if device.type == "cpu" else dtype.itemsize == 2 and hidden_size < MIN_WIDE_HIDDEN_SIZE
    )
    return torch.float32 if uses_float32 else dtype


@functools.cache
def can_overlap_launches(device: torch.device) -> bool:
    """Whether a kernel can start before the previous kernel ends (programmatic dependent launch: Hopper or newer)."""
    capability = describe_device(device).capability
    return capability is not None and capability >= (9, 0)


@functools.cache
def prefers_packed_bf16() -> bool:
    """Whether oneDNN accepts packed (reordered) weights, and multiplies bf16 faster than float32 on this CPU."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001 - torch has no public name for the probe
        and _name_bf16_instructions() is not None
    )


def _name_bf16_instructions() -> str | None:
    """Return the name of the bf16 instructions that oneDNN uses on this CPU; None if they are missing or slow."""
    # On x86, torch's own probe is not enough: it also accepts CPUs that have AVX-512 but no bf16 instructions.
    if platform.machine() not in ("x86_64", "AMD64"):
        return "BF16"
    isa_limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "").upper()
    if isa_limit in _ISA_WITHOUT_BF16:
        return None
    cpu = torch.cpu
    if cpu._is_amx_tile_supported() and "AMX" in (isa_limit if isa_limit.startswith("AVX") else "AMX"):  # noqa: SLF001
        return "AMX"
    # Intel's AVX-512 bf16 instructions are slower than our float32 kernels.
    return "AVX-512 BF16" if cpu._is_avx512_bf16_supported() and not is_intel() else None  # noqa: SLF001


def is_intel() -> bool:
    """Whether this machine has an x86 CPU by Intel. False if the machine has no /proc/cpuinfo."""
    cpu_info = Path("/proc/cpuinfo")
    return cpu_info.exists() and "GenuineIntel" in cpu_info.read_text()


@functools.cache
def has_numba() -> bool:
    """Whether Numba kernels run here: Numba is installed, and torch uses GCC's OpenMP. Does not import Numba."""
    is_installed = sys.platform == "linux" and importlib.util.find_spec("numba") is not None
    return is_installed and hasattr(ctypes.CDLL(None), "GOMP_parallel")


def computes_rows_in_float32(num_rows: int) -> bool:
    """Whether Numba kernels multiply `num_rows` rows by bf16 weights in float32, on a CPU."""
    return has_numba() and num_rows > 0 and (num_rows <= MAX_FLOAT32_ROWS or not prefers_packed_bf16())


def describe_arithmetic(device: torch.device, dtype: torch.dtype) -> str:
    """Describe to users the precision and the library with which `device` multiplies by weights of `dtype`."""
    dtype_name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return dtype_name
    capability = torch.backends.cpu.get_cpu_capability()
    if dtype != torch.bfloat16:
        return f"{dtype_name}, {capability} (torch)"
    float32_text = f"float32 from bfloat16 weights, {capability} (torch)"
    if has_numba():
        from nanovllm_kernels.numba_jit import VECTOR_INSTRUCTIONS

        float32_text = f"float32 from bfloat16 weights, {VECTOR_INSTRUCTIONS} (Numba)"
    if not prefers_packed_bf16():
        return float32_text
    bf16_text = f"bfloat16, {_name_bf16_instructions()} (oneDNN)"
    return f"{bf16_text}; up to {MAX_FLOAT32_ROWS} tokens {float32_text}" if has_numba() else bf16_text
