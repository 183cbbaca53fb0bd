"""Kernels for mixtures of experts compile for Hopper, and have the expected instructions."""

import re

import pytest
from hopper_compiler import COMPILE_MARKS, FLOAT, FP8, INT32, SHARED_MEMORY, compile_kernel

pytestmark = COMPILE_MARKS

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
