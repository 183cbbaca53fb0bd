"""Supports Numba kernels on a CPU: memory access by address, bf16, and the threads of torch's OpenMP runtime.

Kernels take addresses as integers, which makes a call cheap. Callers keep the tensors alive, and check dtypes and
strides. Numba recompiles a kernel only if the file of the kernel changes: after a change here, touch the kernels'
files.
"""

import ctypes
import platform as _platform
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

Function = TypeVar("Function", bound=Callable[..., object])

# Names to show for the vector instructions, by LLVM feature. The widest vectors come first.
_VECTOR_NAMES = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse4.2": "SSE4.2", "sve": "SVE", "neon": "NEON"}
_CPU_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
VECTOR_INSTRUCTIONS = next(
    (name for feature, name in _VECTOR_NAMES.items() if f"+{feature}" in _CPU_FEATURES),
    f"vectors of {_platform.machine()}",
)
# Number of float32 values per vector.
LANES = 16 if VECTOR_INSTRUCTIONS == "AVX-512" else 8

# Fast-math flags that let the compiler reorder sums, as vectorised sums require. NaN and infinity keep their meaning.
_FAST_MATH = {"reassoc", "contract", "nsz"}
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
# `exp` clamps its input to this range. For inputs in the range, results are finite and positive in float32.
EXP_RANGE = (np.float32(-87.0), np.float32(88.0))
# ln 2 is the sum of LN2_PARTS.
LOG2_E, LN2_PARTS = np.float32(1.44269504), (np.float32(0.693359375), np.float32(-2.12194440e-4))
# Coefficients of r^6, r^5, r^4 and r^3 in a polynomial for exp(r).
EXP_TERMS = (np.float32(1.3888889e-3), np.float32(8.3333333e-3), np.float32(4.1666667e-2), np.float32(1.6666667e-1))
_MIN_EXP_INPUT, _MAX_EXP_INPUT = EXP_RANGE
_LN2_HIGH, _LN2_LOW = LN2_PARTS
_C6, _C5, _C4, _C3 = EXP_TERMS

# Addresses of OpenMP functions. Kernels take the address of this array as an argument: Numba caches kernels on disk,
# and the addresses differ between processes.
_OPENMP_FUNCTIONS = np.array(
    [
        ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    ],
    np.int64,
)
OPENMP_FUNCTIONS_PTR: int = _OPENMP_FUNCTIONS.ctypes.data


def _can_cache() -> bool:
    """Whether Numba finds a writable directory for compiled kernels."""
    try:
        numba.njit(cache=True)(_can_cache)
    except RuntimeError:
        return False
    return True


_CAN_CACHE = _can_cache()


def kernel(function: Function) -> Function:
    """Compile `function` to run without the interpreter lock. Kernels may call each other."""
    return numba.njit(nogil=True, cache=_CAN_CACHE, fastmath=_FAST_MATH)(function)


def kernel_without_reordering(function: Function) -> Function:
    """Compile `function` like `kernel`, but keep the order of sums. Results do not depend on vectorisation."""
    return numba.njit(nogil=True, cache=_CAN_CACHE, fastmath={"contract"})(function)


def compile_region(function: Callable[[int], None]) -> int:
    """Compile `function` as an OpenMP parallel region for `run_region`. Returns the compiled function's address.

    function: takes the address of an int64 array. The first element of the array must be OPENMP_FUNCTIONS_PTR.
    """
    address: int = numba.cfunc(types.void(types.int64), cache=_CAN_CACHE, fastmath=_FAST_MATH)(function).address
    return address


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """Convert an int64 address to a pointer for `numba.carray`."""
    if address != types.int64:
        return None
    return types.voidptr(address), lambda _, builder, __, args: builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """Reinterpret a uint32 as float32."""
    if bits != types.uint32:
        return None
    return types.float32(bits), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """Reinterpret a float32 as uint32."""
    if number != types.float32:
        return None
    return types.uint32(number), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def run_region(_typing: Any, region_address: Any, args: Any, num_threads: Any) -> Any:
    """Run a function from `compile_region` on `num_threads` threads. args: the address that the function takes."""
    if (region_address, args, num_threads) != (types.int64,) * 3:
        return None

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        region, args_address, count = values
        byte_pointer, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, byte_pointer, int32, int32])
        pointers = [builder.inttoptr(address, byte_pointer) for address in (region, args_address)]
        arguments = [*pointers, builder.trunc(count, int32), int32(0)]
        builder.call(_load_openmp_function(builder, args_address, 0, function_type), arguments)
        return context.get_dummy_value()

    return types.void(region_address, args, num_threads), lower


@intrinsic
def thread_index(_typing: Any, args: Any) -> Any:
    """Return the index of the calling thread. args: the same address as for `run_region`."""
    return _emit_openmp_call(args, 1)


@intrinsic
def thread_count(_typing: Any, args: Any) -> Any:
    """Return the region's number of threads, at most `num_threads`. args: the same address as for `run_region`."""
    return _emit_openmp_call(args, 2)


def _emit_openmp_call(args: Any, table_index: int) -> Any:
    if args != types.int64:
        return None

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(
            builder.call(_load_openmp_function(builder, values[0], table_index, function_type), []), ir.IntType(64)
        )

    return types.int64(args), lower


def _load_openmp_function(builder: Any, args: Any, table_index: int, function_type: ir.FunctionType) -> Any:
    """Emit code that loads an OpenMP function's address."""
    int64 = ir.IntType(64)
    table = builder.load(builder.inttoptr(args, int64.as_pointer()))
    address = builder.load(builder.inttoptr(builder.add(table, int64(8 * table_index)), int64.as_pointer()))
    return builder.inttoptr(address, function_type.as_pointer())


@kernel
def keep_alive(array):
    """Keep `array` alive until this call. Numba does not track addresses, and would free `array` earlier."""
    return array.size


def prefetch_line(builder: Any, address: Any) -> None:
    """Emit code that prefetches the cache line at `address`, an LLVM value. The address may be invalid."""
    byte_pointer, int32 = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer.type, int32, int32, int32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    builder.call(function, [byte_pointer, int32(0), int32(3), int32(1)])


@intrinsic
def fetch_and_increment(_typing: Any, address: Any) -> Any:
    """Atomically add 1 to the int64 at `address`, and return its previous value."""
    if address != types.int64:
        return None

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        int64 = ir.IntType(64)
        counter_pointer = builder.inttoptr(values[0], int64.as_pointer())
        return builder.atomic_rmw("add", counter_pointer, int64(1), "monotonic")

    return types.int64(address), lower


@kernel
def from_bf16(bits):
    """Convert the uint16 bits of a bf16 number to float32."""
    return float_of_bits(np.uint32(np.uint32(bits) << np.uint32(16)))


@kernel
def to_bf16(number):
    """Round float32 to the nearest bf16, and ties to even. Returns the bits as uint16."""
    if number != number:
        return np.uint16(0x7FC0)
    bits = bits_of_float(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel_without_reordering
def exp(x):
    """Return exp of a float32 with an error of at most 2 ulp, by the method of Cephes' expf.

    The compiler can vectorise this function, but not the C library's exp.
    """
    x = min(max(x, _MIN_EXP_INPUT), _MAX_EXP_INPUT)
    n = np.floor(x * LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _HALF) * r * r + r + _ONE
    return p * float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@kernel
def inverse_rms(x, row, begin, size, eps):
    """Return 1 / sqrt(mean of squares + eps) of `x[row, begin : begin + size]`."""
    total = _ZERO
    for k in range(size):
        total += x[row, begin + k] * x[row, begin + k]
    return _ONE / np.sqrt(total / np.float32(size) + eps)
