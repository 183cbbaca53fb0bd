"""Tests the FP8 tile of the CuTe DSL kernel on a warp simulated in numpy. A register is an array of 32 lanes.

Source of the simulated instructions: the manual of PTX.
"""

import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm_kernels import fp8

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs the extra cutedsl")

LANES = np.arange(32)
LANE_ROW, LANE_COLUMN = LANES // 4, LANES % 4
SLOT_ADDRESS, SCALES_ADDRESS = 1024, 0


class SimulatedWarp:
    """Simulates `cute_ptx`. memory: bytes of shared memory."""

    def __init__(self) -> None:
        self.memory = np.zeros(1 << 15, np.uint8)

    def load_matrices(self, address, *, transpose):
        matrices = []
        for first in range(0, 32, 8):
            rows = np.stack(
                [
                    self.memory[row_address : row_address + 16].view(np.uint16)
                    for row_address in address[first : first + 8]
                ]
            )
            rows = (rows.T if transpose else rows).astype(np.int64)
            matrices.append(rows[LANE_ROW, 2 * LANE_COLUMN] | rows[LANE_ROW, 2 * LANE_COLUMN + 1] << 16)
        return matrices

    def load_shared_two_bytes(self, address):
        return self.memory[address].astype(np.int64) | self.memory[address + 1].astype(np.int64) << 8

    def multiply_add(self, dtype, a, b, c):
        matrix_a, matrix_b, sums = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
        for register, (row_offset, column_offset) in enumerate([(0, 0), (8, 0), (0, 8), (8, 8)]):
            (
                matrix_a[LANE_ROW + row_offset, 2 * LANE_COLUMN + column_offset],
                matrix_a[LANE_ROW + row_offset, 2 * LANE_COLUMN + column_offset + 1],
            ) = unpack_float16(a[register])
        for register, row_offset in enumerate([0, 8]):
            matrix_b[2 * LANE_COLUMN + row_offset, LANE_ROW], matrix_b[2 * LANE_COLUMN + row_offset + 1, LANE_ROW] = (
                unpack_float16(b[register])
            )
        elements = [
            (LANE_ROW, 2 * LANE_COLUMN),
            (LANE_ROW, 2 * LANE_COLUMN + 1),
            (LANE_ROW + 8, 2 * LANE_COLUMN),
            (LANE_ROW + 8, 2 * LANE_COLUMN + 1),
        ]
        for register, element in enumerate(elements):
            sums[element] = c[register]
        sums += matrix_a @ matrix_b
        return [sums[element] for element in elements]

    def e4m3_to_float16(self, word):
        numbers = [decode_e4m3(word >> shift & 0xFF) for shift in (0, 8, 16, 24)]
        return [self.round_pair(None, *numbers[:2]), self.round_pair(None, *numbers[2:])]

    def swap_middle_bytes(self, word):
        return word & 0xFF0000FF | (word & 0xFF00) << 8 | (word & 0xFF0000) >> 8

    def round_pair(self, dtype, low, high):
        low, high = (np.asarray(x).astype(np.float16).view(np.uint16).astype(np.int64) for x in (low, high))
        return low | high << 16

    def power_of_2_from_biased(self, exponent):
        return np.where(exponent > 0, 2.0 ** (exponent - 127.0), 0.0)

    def exp2(self, x):
        return 2.0**x


def unpack_float16(word):
    word = np.broadcast_to(word, 32)
    return [(word >> shift & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64) for shift in (0, 16)]


def decode_e4m3(numbers):
    return torch.from_numpy(numbers.astype(np.uint8)).view(fp8.DTYPE).double().numpy()


@pytest.fixture
def warp(monkeypatch):
    from nanovllm_kernels.attention.gqa import cute_tile_fp8

    warp = SimulatedWarp()
    simulated_arch = SimpleNamespace(fmax=np.maximum, shuffle_sync_bfly=lambda x, mask: x[LANES ^ mask])
    for name, replacement in {"cute_ptx": warp, "arch": simulated_arch, "Int32": int}.items():
        monkeypatch.setattr(cute_tile_fp8, name, replacement)
    monkeypatch.setattr(cute_tile_fp8, "Float32", lambda x: np.broadcast_to(np.asarray(x, np.float64), 32))
    return warp


def fill_slot(memory, numbers, exponents, head_dim):
    """Write keys and values [2, 16, D] and their scales in the layout of the kernel."""
    for key_or_value, token, row_of_token, eighth in np.ndindex(2, 16, head_dim // 128, 8):
        row = (key_or_value * (head_dim // 128) + row_of_token) * 16 + token
        address = SLOT_ADDRESS + row * 128 + (eighth ^ token % 8) * 16
        first_dim = row_of_token * 128 + eighth * 16
        memory[address : address + 16] = numbers[key_or_value, token, first_dim : first_dim + 16]
    memory[SCALES_ADDRESS : SCALES_ADDRESS + 32] = exponents.reshape(-1)


@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("group", [1, 5, 8])
def test_one_warp_attends_like_float64(warp, head_dim, group):
    from nanovllm_kernels.attention.gqa import cute_merge, cute_tile_fp8

    rng = np.random.default_rng(group)
    shape = SimpleNamespace(head_dim=head_dim, is_fp8=True, keys_bytes=16 * head_dim)
    q = np.zeros((8, head_dim))
    q[:group] = rng.normal(size=(group, head_dim)).astype(np.float16)
    queries = [np.zeros(32, np.int64)] * (head_dim // 4)
    for k in range(head_dim // 16):
        lane_elements = [q[LANE_ROW, 16 * k + 4 * LANE_COLUMN + i] for i in range(4)]
        queries[4 * k], queries[4 * k + 2] = (
            warp.round_pair(None, *lane_elements[:2]),
            warp.round_pair(None, *lane_elements[2:]),
        )
    acc, row_max, row_sum = [np.zeros(32)] * (head_dim // 2), [np.full(32, -np.inf)], [np.zeros(32)]
    lane_offsets = LANES % 16 * 128 + ((LANES // 16 ^ LANES % 8) << 4)
    step_values = []
    for _ in range(3):
        kv = torch.from_numpy(rng.normal(size=(2, 16, head_dim)) * 2.0 ** rng.integers(-9, 2, size=(2, 16, 1)))
        numbers, exponents = fp8.quantize(kv)
        step_values.append(fp8.dequantize(numbers, exponents, torch.float32).double().numpy())
        fill_slot(warp.memory, numbers.view(torch.uint8).numpy(), exponents.numpy(), head_dim)
        scores, value_exponents = [np.zeros(32)] * 8, [np.zeros(32, np.int64)] * 4
        addresses = [SLOT_ADDRESS + (lane_offsets ^ 32 * i) for i in range(4)]
        cute_tile_fp8._multiply_keys(shape, queries, scores, addresses)
        cute_tile_fp8._apply_scales(
            scores, value_exponents, SCALES_ADDRESS + 2 * LANE_COLUMN, head_dim**-0.5 * np.log2(np.e)
        )
        cute_tile_fp8._update_softmax(shape, scores, value_exponents, acc, row_max, row_sum)
        cute_tile_fp8._multiply_values(shape, scores, acc, addresses)

    lane_sums = np.zeros(8 * head_dim)
    for tile in range(head_dim // 8):
        offset, first, second = cute_merge._locate_lane_sums(shape, LANES, LANE_ROW, 0, tile)
        lane_sums[offset], lane_sums[offset + 1] = acc[first], acc[second]
    # Undo the swizzle of each row's tiles.
    tiles = lane_sums.reshape(8, head_dim // 8, 8)
    lane_sums = np.stack([tiles[row, np.arange(head_dim // 8) ^ row] for row in range(8)]).reshape(8, head_dim)
    totals = row_sum[0].reshape(8, 4).sum(1)
    keys, values = np.concatenate(step_values, axis=1)
    weights = np.exp(q @ keys.T * head_dim**-0.5)
    expected = weights @ values / weights.sum(1, keepdims=True)
    np.testing.assert_allclose(lane_sums[:group] / totals[:group, None], expected[:group], atol=2e-3)
