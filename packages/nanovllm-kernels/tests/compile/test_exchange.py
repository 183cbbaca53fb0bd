"""Kernels that exchange data between GPUs compile for Hopper, and have the expected instructions."""

import re

import pytest
from hopper_compiler import COMPILE_MARKS, FLOAT, INT32, INT64, SHARED_MEMORY, compile_kernel

pytestmark = COMPILE_MARKS

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
