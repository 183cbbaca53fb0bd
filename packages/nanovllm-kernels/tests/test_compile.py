"""Tests that kernels compile for Hopper and fit into shared memory. The tests need no GPU."""

import importlib.util
import itertools
import os
import re
from collections import defaultdict

import pytest

from nanovllm_kernels.platform import has_triton

pytestmark = [
    pytest.mark.background,
    pytest.mark.slow,
    pytest.mark.skipif(not has_triton() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs triton's compiler"),
]

SHARED_MEMORY = 227 * 1024
INT32, INT64, FLOAT, BFLOAT, FP8, BYTES = "*i32", "*i64", "*fp32", "*bf16", "*fp8e4nv", "*u8"  # pointer types
STEP = dict.fromkeys(
    ["rows_ptr", "query_start_loc_ptr", "tokens_ptr", "num_computed_ptr", "block_table_ptr", "block_tables_ptr"], INT32
) | dict.fromkeys(["input_ids_ptr", "seq_lens_ptr", "sampled_ptr", "is_sampled_ptr", "counts_ptr"], INT32)
DRAFTS = STEP | dict.fromkeys(["drafts_ptr", "num_proposed_ptr", "num_new_ptr"], INT32) | {"matches_ptr": INT64}
SAMPLING = (
    dict.fromkeys(["logits_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "chunk_maxima_ptr", "masses_ptr"], FLOAT)
    | {"segment_maxima_ptr": FLOAT}
    | dict.fromkeys(["top_k_ptr", "best_ids_ptr", "candidate_segments_ptr", "out_ptr"], INT32)
    | dict.fromkeys(["seeds_ptr", "positions_ptr"], INT64)
)
PENALTIES = dict.fromkeys(["repetition_ptr", "presence_ptr", "frequency_ptr", "out_ptr"], FLOAT) | dict.fromkeys(
    ["table_rows_ptr", "counts_ptr"], INT32
)
BIAS = dict.fromkeys(["table_rows_ptr", "ids_ptr", "until_ptr"], INT32) | {
    "out_ptr": FLOAT,
    "values_ptr": FLOAT,
    "positions_ptr": INT64,
}
ROPE = {"cos_sin_ptr": FLOAT, "positions_ptr": INT64, "slot_mapping_ptr": INT64, "eps": "fp32"}
ROPE_SIZES = {"NUM_Q_HEADS": 9, "NUM_KV_HEADS": 3, "HEAD_DIM": 80, "PADDED_DIM": 128, "HALF": 16, "PADDED_HALF": 16} | {
    "HEADS_PER_PROGRAM": 8,
    "Q_BLOCKS": 2,
    "PAGE_SIZE": 16,
    "OVERLAP": True,
}
STATES = (
    dict.fromkeys(["slots_ptr", "checkpoints_ptr", "seq_lens_ptr", "query_start_loc_ptr", "num_pending_ptr"], INT32)
    | dict.fromkeys(
        ["conv_weight_ptr", "weight_ptr", "decay_rate_ptr", "dt_bias_ptr", "norm_ptr", "cumulative_log_decays_ptr"],
        FLOAT,
    )
    | {"recurrent_ptr": FLOAT, "raw_out_ptr": FLOAT, "eps": "fp32"}
)
DELTA_HEADS = {"HEADS": 32, "GROUP_SIZE": 2, "K_DIM": 128, "V_DIM": 128}
DELTA_STEP = DELTA_HEADS | {"PADDED_K": 128, "PADDED_V": 128, "NUM_CHANNELS": 8192, "NUM_TAPS": 4, "OVERLAP": True}
DRAFT_RING = {"RING_ROWS": 14, "RING_WIDTH": 8256}
SCAN = {"MIN_TEMPERATURE": 1e-5, "SEGMENT_TOKENS": 16, "SEGMENTS_PER_CHUNK": 256}
CHOOSE = SCAN | {"MAX_DISTANCE_FROM_MAX": 30.0, "PADDED_CHUNKS": 64, "MAX_CANDIDATE_SEGMENTS": 512, "BLOCK": 8192}

# (module, kernel, warps, argument types, constants). The default types are bf16 pointer and int32.
KERNELS = [
    (
        "elementwise.triton_norm",
        "_rms_norm",
        16,
        {"eps": "fp32"},
        {"ROWS_PER_TOKEN": 1, "ROW_SIZE": 4096, "BLOCK": 4096, "ROWS": 1, "OVERLAP": True},
    ),
    (
        "elementwise.triton_norm",
        "_rms_norm",
        8,
        {"eps": "fp32"},
        {"ROWS_PER_TOKEN": 8, "ROW_SIZE": 80, "BLOCK": 128, "ROWS": 16, "OVERLAP": True},
    ),
    (
        "elementwise.triton_norm",
        "_norm_parts",
        16,
        {"eps": "fp32"},
        {"FIRST_SIZE": 6144, "SECOND_SIZE": 1024, "BLOCK": 8192, "OVERLAP": True},
    ),
    ("elementwise.triton_activation", "_silu_and_mul", 4, {}, {"WIDTH": 3000, "BLOCK": 1024, "OVERLAP": True}),
    ("elementwise.triton_activation", "_sigmoid_and_mul", 4, {}, {"WIDTH": 3000, "BLOCK": 1024, "OVERLAP": True}),
    (
        "elementwise.triton_rope",
        "_rope_and_cache",
        2,
        ROPE,
        ROPE_SIZES | {"NORM": True, "QUANTIZE": False, "WRITES_BACK": True},
    ),
    (
        "elementwise.triton_rope",
        "_rope_and_cache",
        2,
        ROPE | {"kv_cache_ptr": FP8, "kv_scales_ptr": BYTES},
        ROPE_SIZES | {"NORM": False, "QUANTIZE": True, "WRITES_BACK": False},
    ),
    (
        "linear_attention.triton_decode",
        "_decode_requests",
        8,
        STATES,
        DELTA_STEP | {"BLOCK_V": 128, "NUM_BLOCKS": 1, "STAGES": 1},
    ),
    (
        "linear_attention.triton_decode",
        "_decode_requests",
        2,
        STATES | {"recurrent_ptr": BFLOAT},
        DELTA_STEP | {"BLOCK_V": 16, "NUM_BLOCKS": 8, "STAGES": 4},
    ),
    (
        "linear_attention.triton_drafts",
        "_decode_requests",
        4,
        STATES,
        DELTA_STEP | DRAFT_RING | {"BLOCK_V": 128, "NUM_BLOCKS": 1, "STAGES": 1},
    ),
    (
        "linear_attention.triton_drafts",
        "_decode_requests",
        2,
        STATES | {"recurrent_ptr": BFLOAT},
        DELTA_STEP | DRAFT_RING | {"BLOCK_V": 16, "NUM_BLOCKS": 8, "STAGES": 4},
    ),
    (
        "linear_attention.triton_chunks",
        "_convolve_chunks",
        8,
        STATES,
        DRAFT_RING | {"GROUP_SIZE": 2, "K_DIM": 128, "V_DIM": 128, "PADDED": 128, "NUM_CHANNELS": 8192, "NUM_TAPS": 4},
    ),
    (
        "linear_attention.triton_chunks",
        "_save_conv_inputs",
        4,
        STATES,
        {
            "CHANNELS_PER_KEY_HEAD": 512,
            "Z_COLUMNS_PER_KEY_HEAD": 256,
            "NUM_CHANNELS": 8192,
            "NUM_TAPS": 4,
            "CHANNEL_BLOCK": 1024,
        }
        | DRAFT_RING,
    ),
    (
        "linear_attention.triton_chunks",
        "_solve_chunks",
        4,
        STATES,
        DELTA_HEADS | {"PADDED_K": 128, "PADDED_V": 128, "NUM_CHANNELS": 8192},
    ),
    (
        "linear_attention.triton_prefill",
        "_scan_chunks",
        4,
        STATES,
        DELTA_HEADS | {"PADDED_K": 128, "BLOCK_V": 32, "NUM_CHANNELS": 8192},
    ),
    (
        "linear_attention.triton_copy_states",
        "_copy_states",
        8,
        {"states_ptr": FLOAT, "sources_ptr": INT64, "targets_ptr": INT64, "layer_stride": "i64"},
        {"BLOCK": 4096},
    ),
    *(
        (
            "block_copy.triton_block_copy",
            "_copy_blocks",
            8,
            {"chunks_ptr": INT64, "blocks_ptr": INT64, "rows_ptr": words},
            {"WRITES_CACHES": writes_caches, "CHUNK_WORDS": 2048},
        )
        for words, writes_caches in ((INT64, False), (BYTES, True))
    ),
    ("linear_attention.triton_prefill", "_norm_and_gate", 8, STATES, DELTA_HEADS | {"PADDED_V": 128}),
    (
        "request_tables.triton_request_tables",
        "_build_inputs",
        4,
        STEP | {"positions_ptr": INT64, "slot_mapping_ptr": INT64, "last_token_indices_ptr": INT64},
        {"PAGE_SIZE": 16, "BLOCK": 256},
    ),
    ("request_tables.triton_request_tables", "_commit_tokens", 8, STEP, {"COUNTS_TOKENS": True, "BLOCK": 256}),
    ("request_tables.triton_request_tables", "_commit_tokens", 8, STEP, {"COUNTS_TOKENS": False, "BLOCK": 256}),
    ("request_tables.triton_drafts", "_verify_drafts", 1, DRAFTS, {"COUNTS_TOKENS": True, "BLOCK": 32}),
    ("request_tables.triton_drafts", "_verify_drafts", 1, DRAFTS, {"COUNTS_TOKENS": False, "BLOCK": 32}),
    ("request_tables.triton_drafts", "_find_matches", 4, DRAFTS, {"MAX_MATCH": 8, "BLOCK": 1024}),
    (
        "request_tables.triton_drafts",
        "_copy_drafts",
        1,
        DRAFTS,
        {"NUM_DRAFTS": 5, "PADDED_DRAFTS": 8, "BLOCK": 128},
    ),
    ("sampling.triton_adjust", "_apply_penalties", 4, PENALTIES, {"IN_PROMPT_BIT": 1 << 30, "BLOCK": 2048}),
    ("sampling.triton_adjust", "_apply_bias", 4, BIAS, {"BLOCK": 128}),
    (
        "sampling.triton_adjust",
        "_apply_masks",
        4,
        {"out_ptr": FLOAT, "logits_rows_ptr": INT32, "masks_ptr": INT32},
        {"MIN_ALLOWED_LOGIT": -1e30, "BLOCK": 2048},
    ),
    (
        "sampling.triton_adjust",
        "_forbid_sequences",
        4,
        {"out_ptr": FLOAT}
        | dict.fromkeys(["table_rows_ptr", "positions_ptr", "tokens_ptr"], INT32)
        | dict.fromkeys(["num_prompt_ptr", "sequences_ptr"], INT32),
        {"LENGTH": 16, "BLOCK": 128},
    ),
    (
        "sampling.triton_logprobs",
        "_compute_chosen_logprobs",
        16,
        {"tokens_ptr": INT32, "chosen_logprobs_ptr": FLOAT, "normalizer_ptr": FLOAT},
        {"BLOCK": 4096},
    ),
    ("sampling.triton_sample", "_scan_chunk", 4, SAMPLING, SCAN | {"ALL_GREEDY": True, "HAS_FILTERS": False}),
    ("sampling.triton_sample", "_scan_chunk", 4, SAMPLING, SCAN | {"ALL_GREEDY": False, "HAS_FILTERS": False}),
    ("sampling.triton_sample", "_scan_chunk", 4, SAMPLING, SCAN | {"ALL_GREEDY": False, "HAS_FILTERS": True}),
    ("sampling.triton_sample", "_choose_token", 1, SAMPLING, CHOOSE | {"HAS_FILTERS": False}),
    ("sampling.triton_sample", "_choose_token", 16, SAMPLING, CHOOSE | {"HAS_FILTERS": True}),
]


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


@pytest.mark.parametrize(("module", "name", "num_warps", "types", "constants"), KERNELS)
def test_kernel_compiles(module, name, num_warps, types, constants):
    import importlib

    kernel = vars(importlib.import_module(f"nanovllm_kernels.{module}"))[name]
    compiled = compile_kernel(kernel, types, constants, num_warps)
    assert compiled.metadata.shared <= SHARED_MEMORY


def test_every_typed_argument_exists_in_a_kernel():
    """A type with an outdated name would have no effect."""
    import importlib

    type_names, argument_names = defaultdict(set), defaultdict(set)
    for module, name, _, types, _ in KERNELS:
        package = module.partition(".")[0]
        type_names[package].update(types)
        argument_names[package].update(vars(importlib.import_module(f"nanovllm_kernels.{module}"))[name].arg_names)
    unused_names = {package: names - argument_names[package] for package, names in type_names.items()}
    assert not any(unused_names.values()), unused_names


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
    constants = {"WIDTH": 576, "PADDED_WIDTH": 1024, "PAGE_SIZE": 64, "QUANTIZED": cache_type == FP8}
    compile_kernel(triton_expanded._gather_latents, types, constants, num_warps=2)
    constants = {"NUM_HEADS": 16, "HEAD_DIM": 192, "ROPE_DIM": 64, "PADDED_HEADS": 16, "PADDED_ROPE_DIM": 64}
    compile_kernel(triton_expanded._copy_k_rope_to_heads, {}, constants, num_warps=4)
    types = ROPE | {"kv_cache_ptr": cache_type, "kv_scales_ptr": BYTES}
    constants = {"NUM_HEADS": 16, "HEAD_DIM": 192, "LATENT": 512, "PADDED_LATENT": 512, "HALF": 32, "PADDED_HALF": 32}
    constants |= {"HEADS_PER_PROGRAM": 16, "QUANTIZE": cache_type == FP8, "OVERLAP": True}
    compile_kernel(triton_latent._latent_rope_and_cache, types, constants, num_warps=2)


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


FLOAT_NAMES = [
    *("scales_ptr", "x_scales_ptr", "out_scales_ptr"),
    *("weights_ptr", "routing_weights_ptr", "row_weights_ptr", "pair_results_ptr"),
]
ROUTED = dict.fromkeys(FLOAT_NAMES, FLOAT) | (
    dict.fromkeys(["ids_ptr", "counter_ptr", "order_ptr", "starts_ptr", "tiles_ptr"], INT32)
    | dict.fromkeys(["counts_ptr", "indices_in_expert_ptr", "first_rows_ptr"], INT32)
)


@pytest.mark.parametrize("groups", [(1, 1), (8, 4)])
@pytest.mark.parametrize("shared", ["none", "always", "gated"])
def test_route_compiles(groups, shared):
    from nanovllm_kernels.moe import triton_route

    num_groups, top_groups = groups
    sizes = {"NUM_GROUPS": num_groups, "GROUP_SIZE": 256 // num_groups, "PADDED_GROUPS": num_groups}
    sizes |= {"PADDED_SIZE": 256 // num_groups, "TOP_GROUPS": top_groups, "TOP_K": 8}
    sizes |= {"SLOTS": 8, "PADDED_SLOTS": 8} if shared == "none" else {"SLOTS": 9, "PADDED_SLOTS": 16}
    flags = {"SIGMOID": num_groups > 1, "BIAS": num_groups > 1, "RENORMALIZE": True, "OVERLAP": True}
    flags["GATED"] = shared == "gated"
    types = ROUTED | {"logits_ptr": FLOAT, "bias_ptr": FLOAT, "scale": "fp32"}
    compile_kernel(triton_route._route, types, sizes | flags | {"SCORE_SUM_EPS": 1e-20}, num_warps=1)


@pytest.mark.parametrize(
    ("rows", "num_groups", "top_k", "quantized"),
    [(16, 8, 8, False), (32, 128, 8, False), (16, 8, 8, True), (16, 11, 11, True)],
)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("partial", [False, True])
def test_experts_for_few_tokens_compile(partial, gated, rows, num_groups, top_k, quantized):
    """partial: other ranks have experts too."""
    from nanovllm_kernels.moe import policy, triton_unsorted

    hidden_size, width = 2048, 768
    columns, depth = (width, hidden_size) if gated else (hidden_size, width)
    config = policy.unsorted_config(rows, num_groups, columns, depth, is_float32=False, is_block_fp8=quantized)
    constants = {"N": columns, "K": depth, "TOP_K": top_k, "PADDED_TOP_K": 8 if top_k == 8 else 16, "ROWS": rows}
    constants |= {"BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.num_stages}
    constants |= {
        "QUANTIZED": quantized,
        "SWAPPED": config.swapped,
        "GRID_BY_EXPERT": num_groups == 128,
        "PARTIAL": partial,
        "OVERLAP": True,
    }
    constants |= {} if gated else {"RESIDUAL": True}
    kernel = triton_unsorted._gate_up if gated else triton_unsorted._down
    types = ROUTED | ({"weight_ptr": FP8} if quantized else {})
    compiled = compile_kernel(kernel, types, constants, config.num_warps, config.num_stages)
    # Two programs must fit on an SM to hide the latency of loads.
    assert compiled.metadata.shared * 2 <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    assert ("wgmma.mma_async" if config.swapped else "mma.sync") in ptx
    assert ("e4m3.e4m3" in ptx) == quantized
    assert "div.rn.f32" not in ptx
    assert "cp.async" in ptx


@pytest.mark.parametrize(
    ("name", "columns", "depth", "top_k"),
    [
        ("_gate_up", 512, 2048, 11),
        ("_gate_up", 1536, 3072, 8),
        ("_gate_up", 2048, 7168, 9),
        ("_down", 2048, 512, 11),
        ("_down", 2048, 768, 8),
        ("_down", 7168, 2048, 9),
    ],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_experts_for_one_token_avoid_miscompiled_loads(num_ranks, name, columns, depth, top_k):
    from nanovllm_kernels.moe import policy, triton_matvec

    padded_k = 1 << (top_k - 1).bit_length()
    slots = 1 << (-(-top_k // num_ranks) - 1).bit_length()
    config = policy.matvec_config(depth, slots if name == "_down" else 2)
    constants = {"N": columns, "K": depth, "BLOCK_N": config.block_n, "GROUPS": config.num_groups, "OVERLAP": True}
    constants |= {"PADDED_TOP_K": padded_k, "SLOTS": slots, "RESIDUAL": False} if name == "_down" else {}
    constants["PARTIAL"] = num_ranks > 1
    types = ROUTED | {"weight_ptr": FP8}
    compiled = compile_kernel(vars(triton_matvec)[name], types, constants, config.num_warps, multiples=("k",))
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    # The kernel accesses no global memory before the previous kernel ends.
    assert not re.search(r"(ld|st|prefetch)\.global", ptx[: ptx.index("griddepcontrol.wait")])
    assert "div.rn.f32" not in ptx
    # ptxas generates wrong code if a load is known to be masked out.
    assert not re.search(r"mov\.pred\s+%p\d+, 0;", ptx)
    # `check_conversions` had conversions to check.
    assert "E4M3.F32.PACK_AB_MERGE_C" in compiled.asm["sass"]


def grouped_configs():
    from nanovllm_kernels.moe import policy

    plain = [(config, False) for config in (*policy.GROUPED_BY_MAX_ROWS.values(), policy.GROUPED_OF_MORE_ROWS)]
    return plain + [
        (config, True) for config in (*policy.GROUPED_FP8_BY_MAX_ROWS.values(), policy.GROUPED_FP8_OF_MORE_ROWS)
    ]


@pytest.mark.parametrize(("config", "quantized"), grouped_configs())
@pytest.mark.parametrize("gated", [True, False])
def test_grouped_experts_compile(gated, config, quantized):
    from nanovllm_kernels.moe import triton_grouped

    columns, depth = (768, 2048) if gated else (2048, 768)
    constants = {"N": columns, "K": depth, "TOP_K": 8, "GATED": gated, "QUANTIZED": quantized, "OVERLAP": True}
    constants |= {"SWAPPED": config.swapped, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    constants |= {"BLOCK_K": config.block_k, "STAGES": config.num_stages}
    types = ROUTED | ({"x_ptr": FP8, "weight_ptr": FP8} if quantized else {})
    types |= {"out_ptr": FP8} if quantized and gated else {}
    compiled = compile_kernel(triton_grouped._grouped_product, types, constants, config.num_warps, config.num_stages)
    assert compiled.metadata.shared <= SHARED_MEMORY
    ptx = compiled.asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ("e4m3.e4m3" in ptx) == quantized
    assert "div.rn.f32" not in ptx
    assert "cp.async" in ptx


@pytest.mark.parametrize(("hidden_size", "width"), [(7168, 2048), (2048, 512)])
@pytest.mark.parametrize("gated", [True, False])
def test_specialized_experts_do_not_spill(gated, hidden_size, width):
    from nanovllm_kernels.moe import gluon_grouped as kernels

    columns, depth = (width, hidden_size) if gated else (hidden_size, width)
    constants = {"N": columns, "K": depth, "GATED": gated, "STAGES": kernels.STAGES, "OVERLAP": True}
    constants |= {"MULTIPLY_REGISTERS": kernels.MULTIPLY_REGISTERS, "COPY_REGISTERS": kernels.COPY_REGISTERS}
    types = ROUTED | ({"out_ptr": FP8} if gated else {})
    for name, rows in (("x_desc", kernels.WARP_GROUP_ROWS), ("weight_desc", kernels.BLOCK_COLUMNS)):
        types[name] = f"tensordesc<fp8e4nv[{rows}, {kernels.STEP_DEPTH}],{kernels.SHARED_LAYOUT!r}>"
    options = {"maxnreg": kernels.LAUNCH_REGISTERS, "launch_pdl": True}
    compiled = compile_kernel(kernels._grouped_product, types, constants, num_warps=4, **options)
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert "div.rn.f32" not in compiled.asm["ptx"]
    sass = compiled.asm["sass"]
    assert not re.search(r"\b(STL|LDL)\b", sass)
    # The code has one product for each half of the rows. A QGMMA instruction multiplies a depth of 32.
    assert len(re.findall(r"\bQGMMA\b", sass)) == 2 * kernels.STEP_DEPTH // 32
    assert "UTMALDG" in sass
    assert "STG.E.128" in sass


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


@pytest.mark.parametrize("partial", [False, True])
def test_gather_of_rows_compiles(partial):
    from nanovllm_kernels.moe import gluon_grouped as kernels

    constants = {"K": 7168, "TOP_K": 8, "PADDED_GROUPS": 64, "ROWS": kernels.GATHER_ROWS, "BLOCK": kernels.GATHER_BLOCK}
    constants |= {"OVERLAP": True, "x_scales_stride": 1, "PARTIAL": partial}
    types = ROUTED | {"x_ptr": FP8, "rows_ptr": FP8, "row_scales_ptr": FLOAT, "row_weights_ptr": FLOAT}
    compiled = compile_kernel(kernels._gather_rows, types, constants, num_warps=4)
    assert "st.global.v4.b32" in compiled.asm["ptx"]


@pytest.mark.parametrize("single_part", [True, False])
@pytest.mark.parametrize("partial", [False, True])
def test_sort_of_pairs_has_barrier_before_counting(partial, single_part):
    from nanovllm_kernels.moe import triton_sort

    sizes = {"PADDED_EXPERTS": 1024, "PARTIAL": partial, "OVERLAP": True}
    sizes["BLOCK"] = triton_sort.MAX_SINGLE_PART_PAIRS if single_part else triton_sort.SMALL_PART_PAIRS
    counting, rest = triton_sort._count_pairs, {"SINGLE_PART": single_part, "BLOCK_M": 64}
    rest["PARTS_PER_LOAD"] = triton_sort.PARTS_PER_LOAD
    sorting = compile_kernel(triton_sort._sort_pairs, ROUTED, sizes | rest, num_warps=8)
    if not single_part:
        assert "atom.global" not in sorting.asm["ptx"]
    # A barrier lies between the stores of zeros and the counting atomics.
    ptx = (sorting if single_part else compile_kernel(counting, ROUTED, sizes, num_warps=8)).asm["ptx"]
    assert ptx.rindex("bar.sync", 0, ptx.index("atom.global")) > ptx.rindex("st.global", 0, ptx.index("atom.global"))


@pytest.mark.parametrize("partial", [False, True])
def test_sum_of_experts_compiles(partial):
    from nanovllm_kernels.moe import triton_grouped

    sizes = {"N": 2048, "TOP_K": 8, "PARTIAL": partial, "RESIDUAL": True, "BLOCK": 1024, "OVERLAP": True}
    compile_kernel(triton_grouped._sum_pairs, ROUTED, sizes, num_warps=4)


PEERS = {"addresses_ptr": INT64, "phases_ptr": INT32, "eps": "fp32"}
PEER_SIZES = {"RANK": 1, "SIZE": 2, "REGION_BYTES": 1 << 16, "OVERLAP": True}


def check_peer_accesses(compiled, access):
    """access: PTX type of the accesses to buffers of other ranks."""
    ptx, sass = compiled.asm["ptx"], compiled.asm["sass"]
    assert compiled.metadata.shared <= SHARED_MEMORY
    assert f"st.relaxed.sys.global.{access}" in ptx
    assert f"ld.relaxed.sys.global.{access}" in ptx
    assert "STG.E.128.STRONG.SYS" in sass
    assert "LDG.E.128.STRONG.SYS" in sass
    before_wait = ptx[: ptx.index("griddepcontrol.wait")]
    assert "st.global" not in before_wait
    assert ".sys." not in before_wait


@pytest.mark.parametrize(
    ("types", "per_unit", "sums", "sends_parts"),
    [
        ({}, 8, True, False),
        ({"x_ptr": FLOAT, "out_ptr": FLOAT}, 4, True, True),
        ({"x_ptr": INT32, "out_ptr": INT32}, 4, False, False),
        ({"x_ptr": INT32, "out_ptr": INT32}, 2, False, True),
    ],
)
def test_exchange_between_gpus_compiles(types, per_unit, sums, sends_parts):
    from nanovllm_kernels.collective import gluon_exchange, policy

    constants = PEER_SIZES | {
        "CHUNK_UNITS": policy.CHUNK_UNITS,
        "PER_UNIT": per_unit,
        "WARPS": policy.CHUNK_UNITS // 32,
    }
    constants |= {"SENDS_PARTS": sends_parts, "SUMS": sums}
    multiples = ("part_size", "row_size")
    compiled = compile_kernel(
        gluon_exchange._exchange, PEERS | types, constants, constants["WARPS"], multiples=multiples
    )
    check_peer_accesses(compiled, "v2.b64" if per_unit == 2 else "v4.b32")
    assert "STS" not in compiled.asm["sass"]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_shot_sum_compiles(num_ranks):
    from nanovllm_kernels.collective import gluon_two_shot, policy

    constants = PEER_SIZES | {"SIZE": num_ranks, "CHUNK_UNITS": policy.LARGE_CHUNK_UNITS, "PER_UNIT": 8}
    constants["WARPS"] = policy.LARGE_CHUNK_UNITS // 32
    multiples = ("num_elements", "part_size")
    compiled = compile_kernel(gluon_two_shot._all_reduce, PEERS, constants, constants["WARPS"], multiples=multiples)
    check_peer_accesses(compiled, "v4.b32")
    assert "STS" not in compiled.asm["sass"]
    # With more than two ranks, ptxas spills some addresses.
    assert num_ranks > 2 or not re.search(r"\b(STL|LDL)\b", compiled.asm["sass"])


@pytest.mark.parametrize(
    ("row_size", "row_units", "types", "num_ranks"),
    [
        (4096, 512, {}, 2),
        (8192, 1024, {"residual_ptr": FLOAT}, 2),
        (7168, 1024, {}, 8),
        (8192, 2048, {"partial_ptr": FLOAT, "residual_ptr": FLOAT}, 2),
        (576, 128, {"residual_ptr": FLOAT}, 2),
    ],
)
def test_sum_and_norm_of_gpus_compiles(row_size, row_units, types, num_ranks):
    from nanovllm_kernels.collective import gluon_all_reduce_norm, policy

    num_warps = min(policy.MAX_NORM_WARPS, row_units // 32)
    constants = PEER_SIZES | {"SIZE": num_ranks, "ROW_SIZE": row_size, "ROW_UNITS": row_units, "WARPS": num_warps}
    constants |= {"PER_UNIT": 4 if "partial_ptr" in types else 8, "RESIDUAL": True}
    compiled = compile_kernel(gluon_all_reduce_norm._all_reduce_norm, PEERS | types, constants, num_warps)
    check_peer_accesses(compiled, "v4.b32")
    assert not re.search(r"\b(STL|LDL)\b", compiled.asm["sass"])
