"""Kernels for matrix products compile for Hopper, and have the expected instructions."""

import re

import pytest
from hopper_compiler import BFLOAT, COMPILE_MARKS, FLOAT, FP8, INT32, SHARED_MEMORY, compile_kernel

pytestmark = COMPILE_MARKS


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("num_columns", "depth"), [(1024, 3072), (4096, 4096), (14336, 1024)])
def test_few_row_kernel_loads_weights_before_waiting(num_rows, gated, num_columns, depth):
    from nanovllm_kernels.gemm import tiles, triton_few_rows

    config = tiles.few_rows_config(num_rows, num_columns, depth, gated=gated)
    constants = {
        "K": depth,
        "ROWS": num_rows,
        "BLOCK_N": config.block_n,
        "NUM_VECTORS": 32 * config.num_warps,
        "VECTOR": 8,
        "NORM": True,
        "BIAS": False,
        "RESIDUAL": False,
        "GATED": gated,
        "OVERLAP": True,
    }
    compiled = compile_kernel(triton_few_rows._project_few_rows, {"eps": "fp32"}, constants, config.num_warps)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4" in ptx[: ptx.index("griddepcontrol.wait")]
    assert "ld.global.b16" not in ptx


@pytest.mark.parametrize("num_rows", [16, 32, 64, 128, 256])
def test_split_kernel_prefetches_weights_before_waiting(num_rows):
    from nanovllm_kernels.gemm import tiles, triton_split_k

    config = tiles.split_config(num_rows)
    constants = {
        "K": 3072,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "NUM_SPLITS": config.num_splits,
        "STAGES": config.num_stages,
        "BIAS": False,
        "RESIDUAL": True,
        "OVERLAP": True,
    }
    types = {"partial_ptr": FLOAT, "counter_ptr": INT32}
    compiled = compile_kernel(triton_split_k._project_split_k, types, constants, config.num_warps, config.num_stages)
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if config.block_m >= 64 else "mma.sync") in ptx
    assert "prefetch.global.L2" in ptx[: ptx.index("griddepcontrol.wait")]
    assert "cp.async" in ptx[ptx.index("griddepcontrol.wait") :]


@pytest.mark.parametrize("num_rows", [1, 32, 64, 128, 256])
@pytest.mark.parametrize(("num_columns", "gated"), [(1024, False), (28672, False), (2048, True), (14336, True)])
def test_block_fp8_uses_fp8_tensor_cores(num_rows, num_columns, gated):
    from nanovllm_kernels.gemm import tiles, triton_block_fp8

    groups = 32
    config = tiles.block_fp8_config(num_rows, num_columns, groups, gated=gated, may_split=True)
    # The kernel of the norm quantises the inputs of gated products.
    fused = num_rows <= tiles.MAX_FUSED_FP8_ROWS and not gated
    constants = {
        "K": groups * 128,
        "GROUPS": groups,
        "GROUP": 128,
        "ROWS_PER_SCALE": 128,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "NUM_SPLITS": config.num_splits,
        "STAGES": config.num_stages,
        "PREFETCHED_TILES": triton_block_fp8.NUM_PREFETCHED_TILES,
        "TILE_SHARES_SCALE": True,
        "SWAP": config.block_m < triton_block_fp8.MIN_LEFT_ROWS,
        "QUANTIZED": not fused,
        "GATED": gated,
        "BIAS": False,
        "RESIDUAL": not gated,
        "OVERLAP": True,
    }
    types = {"weight_ptr": FP8, "scales_ptr": FLOAT, "partial_ptr": FLOAT, "counter_ptr": INT32}
    types |= {"x_ptr": BFLOAT if fused else FP8, "x_scales_ptr": BFLOAT if fused else FLOAT}
    compiled = compile_kernel(triton_block_fp8._project, types, constants, config.num_warps, config.num_stages)
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    assert re.search(r"wgmma\.mma_async.*\.e4m3\.e4m3", ptx)
    assert "cvt.rn.f16x2.e4m3x2" not in ptx
    assert "prefetch.global.L2" in ptx[: ptx.index("griddepcontrol.wait")]
    assert "cp.async" in ptx[ptx.index("griddepcontrol.wait") :]
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^]]*\], \[[^]]*\], 0x10", ptx)


def test_quantize_groups_compiles():
    from nanovllm_kernels.gemm import triton_block_fp8

    types = {"values_ptr": FP8, "scales_ptr": FLOAT, "eps": "fp32"}
    sizes = {"GROUP": 128, "OVERLAP": True}
    for groups, norm in ((56, True), (8, False)):
        shape = {"K": groups * 128, "GROUPS": groups, "BLOCK_GROUPS": 1 << (groups - 1).bit_length(), "NORM": norm}
        compiled = compile_kernel(triton_block_fp8._norm_and_quantize_groups, types, sizes | shape, num_warps=8)
        assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]
        assert "div.rn.f32" not in compiled.asm["ptx"]
