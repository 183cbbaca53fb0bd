"""Kernels compile for Hopper and fit into shared memory."""

import importlib
from collections import defaultdict

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
        ROPE_TYPES,
        ROPE_SIZES | {"NORM": True, "QUANTIZE": False, "WRITES_BACK": True},
    ),
    (
        "elementwise.triton_rope",
        "_rope_and_cache",
        2,
        ROPE_TYPES | {"kv_cache_ptr": FP8, "kv_scales_ptr": BYTES},
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


@pytest.mark.parametrize(("module", "name", "num_warps", "types", "constants"), KERNELS)
def test_kernel_compiles(module, name, num_warps, types, constants):
    kernel = vars(importlib.import_module(f"nanovllm_kernels.{module}"))[name]
    compiled = compile_kernel(kernel, types, constants, num_warps)
    assert compiled.metadata.shared <= SHARED_MEMORY


def test_every_typed_argument_exists_in_a_kernel():
    """A type with an outdated name would have no effect."""
    type_names, argument_names = defaultdict(set), defaultdict(set)
    for module, name, _, types, _ in KERNELS:
        package = module.partition(".")[0]
        type_names[package].update(types)
        argument_names[package].update(vars(importlib.import_module(f"nanovllm_kernels.{module}"))[name].arg_names)
    unused_names = {package: names - argument_names[package] for package, names in type_names.items()}
    assert not any(unused_names.values()), unused_names
