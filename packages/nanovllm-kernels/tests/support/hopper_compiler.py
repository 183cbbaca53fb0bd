"""Compiles Triton and Gluon kernels for Hopper. This needs no GPU."""

import os
import re

import pytest

from nanovllm_kernels.platform import has_triton

# Marks of the modules with these tests.
COMPILE_MARKS = [
    pytest.mark.background,
    pytest.mark.slow,
    pytest.mark.skipif(not has_triton() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs triton's compiler"),
]

SHARED_MEMORY = 227 * 1024
INT32, INT64, FLOAT, BFLOAT, FP8, BYTES = "*i32", "*i64", "*fp32", "*bf16", "*fp8e4nv", "*u8"  # pointer types
# Types of the arguments that kernels with rotary embeddings have in common.
ROPE_TYPES = {"cos_sin_ptr": FLOAT, "positions_ptr": INT64, "slot_mapping_ptr": INT64, "eps": "fp32"}


def compile_kernel(kernel, types, constants, num_warps, num_stages=3, multiples=(), **options):
    """multiples: names of arguments, other than strides, that are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    signature, alignment = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = types.get(name, BFLOAT if name.endswith("_ptr") else "i32")
        if name.endswith("_ptr") or "stride" in name or name in multiples:
            alignment[(index,)] = [["tt.divisibility", 16]]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, alignment)
    options |= {"num_warps": num_warps, "num_stages": num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if "e4m3" in compiled.asm["ptx"]:
        check_conversions(compiled.asm["sass"])
    return compiled


def check_conversions(sass):
    """Assert that ptxas generated no wrong conversions, see `moe.triton_matvec`."""
    written = {"RZ"}
    for line in sass.splitlines():
        assert not re.search(r"E4M3\.UNPACK_B R\d+, (?!-?R)", line), line
        if "E4M3.F32.PACK_AB_MERGE_C" in line:
            target, *_, merged = re.findall(r"\bR(?:\d+|Z)\b", line.partition("PACK_AB_MERGE_C")[2])
            assert merged in written, line
            written.add(target)
