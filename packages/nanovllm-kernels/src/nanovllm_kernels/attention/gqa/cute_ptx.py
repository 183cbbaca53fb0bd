"""Wraps PTX instructions in functions, for the CuTe DSL decode kernel.

An argument `address` is an Int32 address in shared memory. An argument `pointer` points to global memory. Matrices in
registers have the layout of PTX's `mma.m16n8k16`: lane l holds rows l // 4 and l // 4 + 8 of an accumulator, in columns
2 (l % 4) and 2 (l % 4) + 1.
"""

from cutlass import BFloat16, Float32, Int32
from cutlass.cute import arch


def load_matrices(address, *, transpose):
    """Load four 8 x 8 matrices of 16-bit elements as four Int32. Lanes 8i to 8i + 7 address the rows of matrix i."""
    instruction = (
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" if transpose else "ldmatrix.sync.aligned.m8n8.x4.shared.b16"
    )
    return arch.inline_ptx(
        instruction + " {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];", write_only_types=[Int32] * 4, read_only_args=[address]
    )


def multiply_add(dtype, a, b, c):
    """Return C + A B as four Float32 per lane. A (16 x 16): four Int32. B (16 x 8): two Int32. C: four Float32."""
    type_name = "bf16" if dtype is BFloat16 else "f16"
    return arch.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{type_name}.{type_name}.f32"
        " {{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


def round_pair(dtype, low, high):
    """Round two Float32 to `dtype` and pack them into an Int32."""
    type_name = "bf16x2" if dtype is BFloat16 else "f16x2"
    return arch.inline_ptx(
        f"cvt.rn.{type_name}.f32" + " {$w0}, {$r1}, {$r0};", write_only_types=[Int32], read_only_args=[low, high]
    )


def unpack_pair(dtype, word):
    """Unpack the two `dtype` values of an Int32 as Float32."""
    type_name = "bf16" if dtype is BFloat16 else "f16"
    return arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        f" cvt.f32.{type_name}" + " {$w0}, low;" + f" cvt.f32.{type_name}" + " {$w1}, high; }",
        write_only_types=[Float32] * 2,
        read_only_args=[word],
    )


def e4m3_to_float16(word):
    """Convert the four e4m3 values of an Int32 to float16. Return (lower two, upper two), each pair in an Int32."""
    return arch.inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 {$w0}, low; cvt.rn.f16x2.e4m3x2 {$w1}, high; }",
        write_only_types=[Int32] * 2,
        read_only_args=[word],
    )


def swap_middle_bytes(word):
    """Swap bytes 1 and 2 of an Int32."""
    return arch.inline_ptx("prmt.b32 {$w0}, {$r0}, 0, 0x3120;", write_only_types=[Int32], read_only_args=[word])


def float_bits(x):
    """Reinterpret a Float32 as Int32."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def power_of_2_from_biased(biased_exponent):
    """Return 2 ** (biased_exponent - 127). The argument is the biased exponent of a Float32. Exponent 0 gives 0."""
    return arch.inline_ptx(
        "{ .reg .b32 bits; shl.b32 bits, {$r0}, 23; mov.b32 {$w0}, bits; }",
        write_only_types=[Float32],
        read_only_args=[biased_exponent],
    )


def exp2(x):
    """Return 2 ** x with an error of about 2 ulp. -infinity gives 0."""
    return arch.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def load_shared_two_bytes(address):
    """Load two bytes from an even shared address into the lower half of an Int32."""
    return arch.inline_ptx("ld.shared.u16 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def copy_16_bytes_async(address, pointer, barrier):
    """Start a copy of 16 aligned bytes from global `pointer` to shared `address`. The copy signals `barrier`."""
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], 16, [{$r2}];",
        read_only_args=[address, pointer, barrier],
    )


def load_shared_4_floats(address):
    """Load four Float32 from a shared address that is a multiple of 16."""
    return arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


def store_shared_2_floats(address, low, high):
    """Store two Float32 to a shared address that is a multiple of 8."""
    arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, low, high])


def clear_shared_16_bytes(address):
    """Zero 16 bytes of shared memory."""
    arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[address])


def load_global_4_floats(pointer):
    """Load four Float32 from a pointer aligned to 16 bytes."""
    return arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[pointer],
    )


def store_global_4_floats(pointer, values):
    """Store four Float32 to a pointer aligned to 16 bytes."""
    arch.inline_ptx("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[pointer, *values])


def load_global_2_floats(pointer):
    """Load two Float32 from a pointer aligned to 8 bytes."""
    return arch.inline_ptx(
        "ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[pointer]
    )


def store_global_2_words(pointer, low, high):
    """Store two values of 4 bytes to a pointer aligned to 8 bytes."""
    arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[pointer, low, high])
