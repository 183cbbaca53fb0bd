"""Attention kernels compile for Hopper, fit into shared memory, and have the expected instructions."""

import importlib.util
import itertools
import re

import pytest
from hopper_compiler import (
    BFLOAT,
    BYTES,
    COMPILE_MARKS,
    FLOAT,
    FP8,
    INT32,
    INT64,
    ROPE_TYPES,
    SHARED_MEMORY,
    compile_kernel,
)

pytestmark = COMPILE_MARKS


def attention_constants(config, head_dim, group_size):
    return {
        "NUM_KV_HEADS": 8,
        "GROUP_SIZE": group_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": 1 << (head_dim - 1).bit_length(),
        "PAGE_SIZE": 16,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
    }


SEQUENCE_TYPES = dict.fromkeys(["block_tables_ptr", "seq_lens_ptr", "query_start_loc_ptr"], INT32)
WORK_LIST = {"tile_first_blocks_ptr": INT64, "tiles_ptr": INT32, "parts_ptr": INT64}


def compile_tile(kernel, types, constants, config):
    options = {"num_stages": config.num_stages, "maxnreg": config.max_registers, "launch_pdl": True}
    compiled = compile_kernel(kernel, types, constants, config.num_warps, **options)
    assert compiled.metadata.shared * config.ctas_per_sm <= SHARED_MEMORY
    return compiled


HEAD_DIMS = (64, 80, 128, 256)
ATTENTION_CASES = [*itertools.product(HEAD_DIMS, (False, True), (BFLOAT,), (BFLOAT, FP8))]
# Float32 kernels take longest to compile, so these cases are not all combinations.
ATTENTION_CASES += [
    (head_dim, (index % 2 == 0) == (cache_type == FLOAT), FLOAT, cache_type)
    for index, head_dim in enumerate(HEAD_DIMS)
    for cache_type in (FLOAT, FP8)
]


@pytest.mark.parametrize(("head_dim", "many_queries", "dtype", "cache_type"), ATTENTION_CASES)
def test_attention_fits_shared_memory_and_has_expected_instructions(head_dim, many_queries, dtype, cache_type):
    from nanovllm_kernels.attention.gqa import triton_gqa
    from nanovllm_kernels.attention.plan import tile_configs

    group_size = 4
    sizes = {FLOAT: 4, BFLOAT: 2, FP8: 1}
    config = tile_configs.gqa_tile_config(
        head_dim,
        tile_configs.tile_element_bytes(sizes[dtype], sizes[cache_type]),
        group_size,
        many_queries=many_queries,
    )
    types = SEQUENCE_TYPES | WORK_LIST | {"scale_log2": "fp32"}
    types |= {"q_ptr": dtype, "kv_ptr": cache_type, "scales_ptr": BYTES}
    types |= {"out_ptr": dtype, "partial_out_ptr": FLOAT, "partial_lse_ptr": FLOAT}
    constants = attention_constants(config, head_dim, group_size) | {"QUANTIZED": cache_type == FP8, "OVERLAP": True}
    constants |= {"BLOCK_Q": config.block_m // group_size, "UNMASKED_LOOP": many_queries}
    compiled = compile_tile(triton_gqa._attend, types, constants, config)
    if dtype == BFLOAT:
        assert ("wgmma.mma_async" if many_queries else "mma.sync") in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]
    if (dtype, cache_type) == (BFLOAT, FP8):
        assert "cvt.rn.f16x2.e4m3x2" in compiled.asm["ptx"]


LATENTS = {"LATENT_DIM": 512, "PADDED_LATENT_DIM": 512, "ROPE_DIM": 64, "PADDED_ROPE_DIM": 64, "PAGE_SIZE": 64}


@pytest.mark.parametrize("many_queries", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "dtype", "cache_type"),
    [(16, BFLOAT, BFLOAT), (128, BFLOAT, BFLOAT), (16, BFLOAT, FP8), (128, BFLOAT, FP8), (16, FLOAT, FLOAT)],
)
def test_latent_attention_compiles(num_heads, many_queries, dtype, cache_type):
    from nanovllm_kernels.attention.mla import triton_absorbed
    from nanovllm_kernels.attention.plan import tile_configs

    sizes = {FLOAT: 4, BFLOAT: 2, FP8: 1}
    config = tile_configs.latent_tile_config(
        num_heads, tile_configs.tile_element_bytes(sizes[dtype], sizes[cache_type]), many_queries=many_queries
    )
    tile_heads = tile_configs.latent_tile_heads(num_heads, config)
    types = SEQUENCE_TYPES | WORK_LIST | {"scale_log2": "fp32"}
    types |= {"q_latent_ptr": dtype, "q_rope_ptr": dtype, "kv_ptr": cache_type, "scales_ptr": BYTES}
    types |= {"out_ptr": dtype, "partial_out_ptr": FLOAT, "partial_lse_ptr": FLOAT}
    constants = LATENTS | {"NUM_HEADS": num_heads, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    constants |= {"TILE_HEADS": tile_heads, "BLOCK_Q": config.block_m // tile_heads, "OVERLAP": True}
    constants["QUANTIZED"] = cache_type == FP8
    compiled = compile_tile(triton_absorbed._attend_latents, types, constants, config)
    if dtype == BFLOAT:
        assert ("mma.sync" if config.block_m < 64 else "wgmma.mma_async") in compiled.asm["ptx"]


@pytest.mark.parametrize(("dtype", "size"), [(BFLOAT, 2), (FLOAT, 4)])
def test_latent_attention_of_whole_prompts_compiles(dtype, size):
    from nanovllm_kernels.attention.mla import triton_expanded
    from nanovllm_kernels.attention.plan import tile_configs

    config = tile_configs.EXPANDED_TILES[size]
    constants = {"NUM_HEADS": 16, "TOKEN_STRIDE": 16 * 256, "KEY_DIM": 128, "PADDED_KEY_DIM": 128, "ROPE_DIM": 64}
    constants |= {"PADDED_ROPE_DIM": 64, "VALUE_DIM": 128, "PADDED_VALUE_DIM": 128}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    types = SEQUENCE_TYPES | dict.fromkeys(["q_ptr", "kv_ptr", "k_rope_ptr", "out_ptr"], dtype) | {"scale_log2": "fp32"}
    kernel = triton_expanded._attend_whole_prompts
    compiled = compile_kernel(kernel, types, constants, config.num_warps, config.num_stages)
    assert compiled.metadata.shared * config.ctas_per_sm <= SHARED_MEMORY
    assert dtype == FLOAT or "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize(("dtype", "size"), [(BFLOAT, 2), (FLOAT, 4)])
@pytest.mark.parametrize(("depth", "columns", "is_transposed"), [(128, 512, False), (512, 128, True)])
def test_head_projections_compile(dtype, size, depth, columns, is_transposed):
    from nanovllm_kernels.attention.mla import triton_head_projection

    tile = triton_head_projection.PRODUCT_TILES[size]
    constants = {"K": depth, "N": columns, "weight_stride_k" if is_transposed else "weight_stride_n": 1}
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k}
    types = dict.fromkeys(["x_ptr", "weight_ptr", "out_ptr"], dtype) | {"num_projected_ptr": INT32}
    kernel = triton_head_projection._project_heads
    compiled = compile_kernel(kernel, types, constants, tile.num_warps, tile.num_stages)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert dtype == FLOAT or "wgmma.mma_async" in compiled.asm["ptx"]


@pytest.mark.parametrize("cache_type", [BFLOAT, FP8])
def test_latent_rope_and_cache_compiles(cache_type):
    from nanovllm_kernels.attention.mla import triton_expanded
    from nanovllm_kernels.elementwise import triton_latent

    types = SEQUENCE_TYPES | {"kv_ptr": cache_type, "scales_ptr": BYTES}
    constants = {"LATENT_DIM": 512, "WIDTH": 576, "PADDED_WIDTH": 1024, "PAGE_SIZE": 64, "QUANTIZED": cache_type == FP8}
    compile_kernel(triton_expanded._gather_latents, types, constants, num_warps=2)
    constants = {"NUM_HEADS": 16, "HEAD_DIM": 192, "ROPE_DIM": 64, "PADDED_HEADS": 16, "PADDED_ROPE_DIM": 64}
    compile_kernel(triton_expanded._copy_k_rope_to_heads, {}, constants, num_warps=4)
    types = ROPE_TYPES | {"kv_cache_ptr": cache_type, "kv_scales_ptr": BYTES}
    constants = {"NUM_HEADS": 16, "HEAD_DIM": 192, "LATENT": 512, "PADDED_LATENT": 512, "HALF": 32, "PADDED_HALF": 32}
    constants |= {"HEADS_PER_PROGRAM": 16, "QUANTIZE": cache_type == FP8, "OVERLAP": True}
    compile_kernel(triton_latent._latent_rope_and_cache, types, constants, num_warps=2)


@pytest.mark.parametrize(("slots", "rows"), [(16, 1), (4, 8)])
def test_merge_of_parts_compiles(slots, rows):
    from nanovllm_kernels.attention import triton_split_kv

    types = WORK_LIST | {"partial_out_ptr": FLOAT, "partial_lse_ptr": FLOAT, "query_start_loc_ptr": INT32}
    sizes = {
        "NUM_HEADS": 32,
        "BLOCK_HEADS": 4,
        "HEAD_DIM": 80,
        "PADDED_DIM": 128,
        "BLOCK_M": 16 * rows,
        "BLOCK_Q": 4 * rows,
    }
    sizes |= {"MERGED_SLOTS": slots, "MERGED_ROWS": rows, "OVERLAP": True}
    compile_kernel(triton_split_kv._merge_parts, types, sizes, num_warps=4)


def test_gather_of_requests_compiles():
    from nanovllm_kernels.attention.plan import triton_flash_requests

    kernel = triton_flash_requests._gather_requests
    types = {name: INT32 for name in kernel.arg_names if name.endswith("_ptr")}
    sizes = {"REQUEST_BLOCK": triton_flash_requests.REQUEST_BLOCK, "PAGE_BLOCK": triton_flash_requests.PAGE_BLOCK}
    compile_kernel(kernel, types, sizes, num_warps=4)


def test_work_list_planning_compiles():
    from nanovllm_kernels.attention.plan import triton_work_list

    kernel = triton_work_list._plan_work
    types = {name: INT32 for name in kernel.arg_names if name.endswith("_ptr")} | WORK_LIST
    sizes = {"BLOCK_Q": 32, "BLOCK_N": 64, "BLOCK": triton_work_list.PLAN_BLOCK}
    compile_kernel(kernel, types, sizes, num_warps=4)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the extra cutedsl")
@pytest.mark.parametrize(
    ("head_dim", "group_size", "queries", "page_size", "dtype"),
    [
        # For any two of head_dim, page_size and dtype, each combination of their values occurs.
        *(
            (64, 1, 1, 16, "BFloat16"),
            (64, 8, 1, 32, "Float16"),
            (64, 16, 1, 64, "BFloat16"),
            (64, 3, 5, 16, "Float16"),
        ),
        *((128, 1, 1, 16, "Float16"), (128, 8, 1, 32, "BFloat16"), (128, 16, 1, 64, "Float16")),
        *((128, 4, 4, 64, "BFloat16"), (256, 8, 2, 16, "BFloat16")),
        *((256, 1, 1, 16, "BFloat16"), (256, 8, 1, 32, "Float16"), (256, 16, 1, 64, "BFloat16")),
    ],
)
def test_cute_decode_fits_shared_memory(head_dim, group_size, queries, page_size, dtype, tmp_path):
    ptx = compile_cute(head_dim, group_size, queries, page_size, dtype, dtype, tmp_path)
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{'bf16' if dtype == 'BFloat16' else 'f16'}" in ptx


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the extra cutedsl")
@pytest.mark.parametrize(
    ("head_dim", "group_size", "queries", "page_size", "dtype"),
    [
        *((128, 1, 1, 16, "BFloat16"), (128, 8, 1, 64, "Float16"), (128, 4, 2, 16, "BFloat16")),
        *((256, 1, 1, 16, "Float16"), (256, 8, 1, 64, "BFloat16")),
    ],
)
def test_cute_decode_of_fp8_cache_compiles(head_dim, group_size, queries, page_size, dtype, tmp_path):
    ptx = compile_cute(head_dim, group_size, queries, page_size, dtype, "Uint8", tmp_path)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16" in ptx
    assert "cvt.rn.f16x2.e4m3x2" in ptx


def compile_cute(head_dim, group_size, queries, page_size, dtype, cache_type, tmp_path):
    import cutlass

    from nanovllm_kernels.attention.gqa import cute_decode
    from nanovllm_kernels.attention.gqa.cute_tile import DecodeShape

    ring = cute_decode.FP8_RING_SIZES[head_dim] if cache_type == "Uint8" else cute_decode.RING_SIZES[head_dim]
    shape = DecodeShape(
        getattr(cutlass, dtype),
        getattr(cutlass, cache_type),
        head_dim,
        group_size,
        queries > 1,
        queries,
        page_size,
        *ring,
    )
    # The system reserves the first KiB of shared memory.
    slot = shape.slot_bytes + shape.scale_bytes + 8
    assert shape.num_warps * (shape.num_stages * slot + 128 + 4) + 256 <= SHARED_MEMORY - 1024
    compiled = cute_decode.compile_decode(shape, f"--gpu-arch sm_90a --keep-ptx --keep-cubin --dump-dir {tmp_path}")
    assert compiled.__cubin__
    ptx = compiled.__ptx__
    assert ".target sm_90a" in ptx
    assert "cp.async.bulk.tensor" in ptx
    return ptx


@pytest.mark.parametrize("page_size", [16, 32, 64])
def test_specialized_latent_attention_does_not_spill(page_size):
    from nanovllm_kernels.attention.mla import gluon_absorbed as kernels

    constants = {"NUM_HEADS": 128, "PAGE_SIZE": page_size, "STAGES": kernels.STAGES, "OVERLAP": True}
    constants |= {"MULTIPLY_REGISTERS": kernels.MULTIPLY_REGISTERS, "COPY_REGISTERS": kernels.COPY_REGISTERS}
    types = SEQUENCE_TYPES | WORK_LIST | {"partial_out_ptr": FLOAT, "partial_lse_ptr": FLOAT, "scale_log2": "fp32"}
    for name, rows in (("q_desc", 64), ("rope_desc", 64), ("kv_desc", page_size), ("out_desc", 64)):
        types[name] = f"tensordesc<bf16[{rows}, {kernels.BOX_COLUMNS}],{kernels.SHARED_LAYOUT!r}>"
    options = {"maxnreg": kernels.LAUNCH_REGISTERS, "launch_pdl": True}
    compiled = compile_kernel(kernels._attend_parts, types, constants, num_warps=4, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY
    sass = compiled.asm["sass"]
    # With pages of 16 tokens, the copying warp spills some addresses. This warp waits for memory anyway.
    spills = [match.start() for match in re.finditer(r"\b(STL|LDL)\b", sass)]
    assert len(spills) < (64 if page_size == 16 else 1)
    assert "HGMMA" not in sass[min(spills, default=0) : max(spills, default=0)]
    assert len(re.findall(r"\bHGMMA\b", sass)) == 9 * 4 + 4 + 4
    assert "UTMALDG" in sass
    assert "UTMASTG" in sass
