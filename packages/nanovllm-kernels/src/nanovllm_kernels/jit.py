"""Numba, the kernel language of the CPU: memory by address, bf16, and the threads that torch computes with.

For what torch has no operator: few rows, and products in float32 from bf16 weights. Kernels take addresses as integers,
so that a call costs a microsecond; callers keep the tensors alive, and have seen to their dtypes and strides.
Compiled when first used, for this machine, and kept where the source lies or in the user's cache directory, until their
own file changes: after a change of this one, touch theirs.

Threads are those of the OpenMP runtime that torch has loaded: still awake from the operator before, and no more of them
than cores. (Numba's own would be another pool, and two pools that wait by spinning cost milliseconds a step.)

Importing this room imports numba: ask `platform.has_numba` first. It must not know any operator.
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

F = TypeVar("F", bound=Callable[..., object])

_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse4.2": "SSE4.2", "sve": "SVE", "neon": "NEON"}
# What Numba compiles for. Kernels that are kept are told apart by it.
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
INSTRUCTIONS = next(
    (name for feature, name in _VECTORS.items() if f"+{feature}" in _FEATURES), f"vectors of {_platform.machine()}"
)
# float32 numbers that a vector register holds, or two.
LANES = 16 if INSTRUCTIONS == "AVX-512" else 8

# Sums may be taken in any order, or no loop over them could be vectorised; numbers that aren't finite stay such.
_SUMS = {"reassoc", "contract", "nsz"}
_ZERO, _HALF, _ONE = np.float32(0.0), np.float32(0.5), np.float32(1.0)
# exp: the range outside of which it is constant, ln 2 in two parts, and the polynomial's terms from the sixth power on.
EXP_RANGE = (np.float32(-87.0), np.float32(88.0))
LOG2_E, LN2_PARTS = np.float32(1.44269504), (np.float32(0.693359375), np.float32(-2.12194440e-4))
EXP_TERMS = (np.float32(1.3888889e-3), np.float32(8.3333333e-3), np.float32(4.1666667e-2), np.float32(1.6666667e-1))
_LEAST, _MOST = EXP_RANGE
_LN2_HIGH, _LN2_LOW = LN2_PARTS
_C6, _C5, _C4, _C3 = EXP_TERMS

# Where OpenMP's functions are. Numba keeps no kernel that knows an address, so that kernels are told where this lies.
_OPENMP = np.array(
    [
        ctypes.cast(ctypes.CDLL(None)[name], ctypes.c_void_p).value
        for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    ],
    np.int64,
)
OPENMP: int = _OPENMP.ctypes.data


def _can_keep() -> bool:
    try:
        numba.njit(cache=True)(_can_keep)
    except RuntimeError:
        # No directory can be written to: everything is compiled at each start.
        return False
    return True


_KEEP = _can_keep()


def kernel(function: F) -> F:
    """`function`, compiled, and called without the interpreter lock; kernels may call one another."""
    return numba.njit(nogil=True, cache=_KEEP, fastmath=_SUMS)(function)


def ordered_kernel(function: F) -> F:
    """As `kernel`, but sums keep their order, so that a number does not depend on how its loop was vectorised."""
    return numba.njit(nogil=True, cache=_KEEP, fastmath={"contract"})(function)


def region(function: Callable[[int], None]) -> int:
    """The address of `function`, compiled, for `run_region`. It takes the address of its arguments, int64 each: the
    first is OPENMP, the others are its own.
    """
    address: int = numba.cfunc(types.void(types.int64), cache=_KEEP, fastmath=_SUMS)(function).address
    return address


@intrinsic
def pointer(_typing: Any, address: Any) -> Any:
    """An address, int64, as what `numba.carray` takes."""
    if address != types.int64:
        return None
    return types.voidptr(address), lambda _, builder, __, args: builder.inttoptr(args[0], ir.IntType(8).as_pointer())


@intrinsic
def float_of_bits(_typing: Any, bits: Any) -> Any:
    """The float32 that a uint32 is."""
    if bits != types.uint32:
        return None
    return types.float32(bits), lambda _, builder, __, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of_float(_typing: Any, number: Any) -> Any:
    """The uint32 that a float32 is."""
    if number != types.float32:
        return None
    return types.uint32(number), lambda _, builder, __, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def run_region(_typing: Any, region: Any, args: Any, num_threads: Any) -> Any:
    """Call a region at address `region` with `args`, the address of its arguments, on `num_threads` threads at once."""
    if (region, args, num_threads) != (types.int64,) * 3:
        return None

    def lower(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        body, data, count = values
        place, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place, place, word, word])
        arguments = [
            builder.inttoptr(body, place),
            builder.inttoptr(data, place),
            builder.trunc(count, word),
            word(0),
        ]
        builder.call(_openmp_function(builder, data, 0, kind), arguments)
        return context.get_dummy_value()

    return types.void(region, args, num_threads), lower


@intrinsic
def thread_index(_typing: Any, args: Any) -> Any:
    """Which of a region's threads this one is; args: the address that the region was given."""
    return _openmp_number(args, 1)


@intrinsic
def thread_count(_typing: Any, args: Any) -> Any:
    """How many threads a region has, which may be fewer than were asked for; args: as for `thread_index`."""
    return _openmp_number(args, 2)


def _openmp_number(args: Any, entry: int) -> Any:
    if args != types.int64:
        return None

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.sext(builder.call(_openmp_function(builder, values[0], entry, kind), []), ir.IntType(64))

    return types.int64(args), lower


def _openmp_function(builder: Any, args: Any, entry: int, kind: ir.FunctionType) -> Any:
    wide = ir.IntType(64)
    table = builder.load(builder.inttoptr(args, wide.as_pointer()))
    address = builder.load(builder.inttoptr(builder.add(table, wide(8 * entry)), wide.as_pointer()))
    return builder.inttoptr(address, kind.as_pointer())


@kernel
def keep(array):
    """Have `array` live until here: Numba frees what isn't used any more, and doesn't see that its address is."""
    return array.size


def prefetch_line(builder: Any, address: Any) -> None:
    """Have the cache line at an address, an LLVM value, fetched; it need not be there."""
    place, word = builder.inttoptr(address, ir.IntType(8).as_pointer()), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, word, word, word])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [place, word(0), word(3), word(1)])


@intrinsic
def next_item(_typing: Any, address: Any) -> Any:
    """Add 1 to the int64 at an address, for all threads at once, and return what it was."""
    if address != types.int64:
        return None

    def lower(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        wide = ir.IntType(64)
        place = builder.inttoptr(values[0], wide.as_pointer())
        return builder.atomic_rmw("add", place, wide(1), "monotonic")

    return types.int64(address), lower


@kernel
def from_bf16(number):
    """float32 of bf16, a uint16."""
    return float_of_bits(np.uint32(np.uint32(number) << np.uint32(16)))


@kernel
def to_bf16(number):
    """bf16, a uint16, of float32: the nearest, of two the even one."""
    if number != number:
        return np.uint16(0x7FC0)
    bits = bits_of_float(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@ordered_kernel
def exp(x):
    """exp of float32 to 2 units in the last place; e^-87 and e^88 beyond. Unlike the library's, loops of it vectorise.

    2^n times a polynomial of what is left, as in Cephes' expf.
    """
    x = min(max(x, _LEAST), _MOST)
    n = np.floor(x * LOG2_E + _HALF)
    r = x - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _HALF) * r * r + r + _ONE
    return p * float_of_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@kernel
def inverse_rms(x, row, begin, size, eps):
    """1 / sqrt(mean of squares + eps) of `size` numbers of a row of x from `begin` on."""
    total = _ZERO
    for k in range(size):
        total += x[row, begin + k] * x[row, begin + k]
    return _ONE / np.sqrt(total / np.float32(size) + eps)
