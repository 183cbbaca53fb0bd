"""Chooses an expert kernel and its tiles for a number of tokens. A pair is a token and one of its chosen experts.

| tokens | weights | kernel |
|---|---|---|
| 1 | block FP8 | `triton_matvec`: matrix-vector products |
| up to MAX_UNSORTED_TOKENS (FP8: MAX_UNSORTED_FP8_TOKENS) | any | `triton_unsorted`: pairs not sorted by expert |
| more, >= MIN_SPECIALIZED_AVERAGE_ROWS rows per expert | FP8, on Hopper | `gluon_grouped`: sorted, specialised warps |
| more | any | `triton_grouped`: sorted pairs |

With expert parallelism, each rank counts all tokens and all pairs, including pairs with other ranks' experts. The
average number of rows per expert is therefore pairs / `PackedExperts.num_all_experts`.

The constants were measured on one H200, with uncached weights: 128 to 512 experts, with hidden size x intermediate
size from 2048 x 512 to 7168 x 2048.
"""

from typing import Literal, NamedTuple

import torch

from nanovllm_kernels.moe.experts import PackedExperts
from nanovllm_kernels.platform import describe_device

Kernel = Literal["matvec", "unsorted", "grouped", "specialized"]  # specialized: `gluon_grouped`

# Maximum number of tokens for `triton_unsorted`. Lower for block FP8, because each program quantises all rows.
MAX_UNSORTED_TOKENS = 32
MAX_UNSORTED_FP8_TOKENS = 8
# Minimum average number of rows per expert for `gluon_grouped`.
MIN_SPECIALIZED_AVERAGE_ROWS = 16
# Rows per tile of `gluon_grouped`.
GLUON_TILE_ROWS = 128
# Rows and columns of a weight block that shares an FP8 scale.
GROUP = 128


def choose_kernel(
    num_tokens: int, top_k: int, experts: PackedExperts, dtype: torch.dtype, device: torch.device
) -> Kernel:
    """Choose the kernel for `num_tokens` tokens of `dtype`."""
    is_block_fp8 = experts.scales13 is not None
    if num_tokens == 1 and is_block_fp8:
        return "matvec"
    if num_tokens <= (MAX_UNSORTED_FP8_TOKENS if is_block_fp8 else MAX_UNSORTED_TOKENS):
        return "unsorted"
    _, hidden_size, intermediate_size = experts.w2.shape
    has_whole_tiles = hidden_size % (2 * GROUP) == 0 and intermediate_size % GROUP == 0
    has_enough_rows = num_tokens * top_k >= MIN_SPECIALIZED_AVERAGE_ROWS * experts.num_all_experts
    is_supported = is_block_fp8 and dtype.itemsize == 2 and describe_device(device).capability == (9, 0)
    return "specialized" if is_supported and has_whole_tiles and has_enough_rows else "grouped"


# Columns per program of `triton_matvec`, a divisor of GROUP.
MATVEC_COLUMNS = 4
# Maximum number of weight elements that a program of `triton_matvec` loads at once.
MAX_MATVEC_TILE_ELEMENTS = 16 * 1024
# Maximum depth (number of elements per sum) for which `triton_matvec` uses four warps instead of eight.
MAX_FOUR_WARP_DEPTH = 2048


class MatvecConfig(NamedTuple):
    """Tile of `triton_matvec`: `block_n` columns, and `num_groups` groups of 128 elements along K at once."""

    block_n: int
    num_groups: int
    num_warps: int


def matvec_config(depth: int, rows_per_column: int) -> MatvecConfig:
    """Return the tile for sums over `depth` elements. rows_per_column: weight rows per result column."""
    max_groups = max(1, MAX_MATVEC_TILE_ELEMENTS // (MATVEC_COLUMNS * rows_per_column * GROUP))
    padded_groups = 1 << (-(-depth // GROUP) - 1).bit_length()
    return MatvecConfig(MATVEC_COLUMNS, min(padded_groups, max_groups), 8 if depth > MAX_FOUR_WARP_DEPTH else 4)


# `triton_unsorted` uses the widest tile with which a launch has at least this number of programs.
MIN_WIDE_TILE_PROGRAMS = 288
# Tensor cores need tiles with at least this number of columns.
MIN_TILE_COLUMNS = 16
# Tiles with more than this number of rows have at most 32 columns, so that two tiles fit on an SM.
MAX_ROWS_OF_WIDE_TILES = 16
# Minimum depth for which FP8 launches have four pipeline stages instead of three.
MIN_FOUR_STAGE_DEPTH = 4096


class UnsortedConfig(NamedTuple):
    """Tile of `triton_unsorted`. swapped: the weight is the left operand of products."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool


def unsorted_config(
    num_rows: int, num_experts: int, num_columns: int, depth: int, *, is_float32: bool, is_block_fp8: bool
) -> UnsortedConfig:
    """Return the tile for `num_experts` products with `num_columns` columns. num_rows: rows per tile. depth: K."""
    if is_block_fp8:
        # Hopper multiplies e4m3 only if the left operand has 64 rows. For fewer rows, Triton converts e4m3 to float16.
        return UnsortedConfig(64, GROUP, 4, 4 if depth >= MIN_FOUR_STAGE_DEPTH else 3, swapped=True)
    widths = (64, 32) if num_rows <= MAX_ROWS_OF_WIDE_TILES else (32,)
    suitable_widths = (n for n in widths if num_experts * -(-num_columns // n) >= MIN_WIDE_TILE_PROGRAMS)
    block_n = next(suitable_widths, MIN_TILE_COLUMNS)
    if is_float32:
        return UnsortedConfig(block_n, 32, 4, 2, swapped=False)
    return UnsortedConfig(block_n, 128, 4, 4 if num_rows <= MAX_ROWS_OF_WIDE_TILES else 3, swapped=False)


def num_counters(num_columns: int) -> int:
    """Return the number of counters of `triton_unsorted`: the maximum number of column tiles."""
    return -(-num_columns // MIN_TILE_COLUMNS)


class GroupedConfig(NamedTuple):
    """Tile of `triton_grouped`. swapped: the weight is the left operand of products."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool
    programs_per_sm: int = 2


# Tiles by maximum average number of rows per expert. Many experts have more rows than the average, and an expert with
# more rows than a tile needs a second tile. In bf16, tiles with more rows than the average are therefore faster.
GROUPED_BY_MAX_ROWS = {
    12: GroupedConfig(16, 64, 128, 4, 4, swapped=True),
    28: GroupedConfig(32, 64, 128, 4, 4, swapped=True),
    64: GroupedConfig(64, 128, 64, 4, 3, swapped=True),
}
GROUPED_OF_MORE_ROWS = GroupedConfig(128, 128, 64, 8, 3, swapped=False)
GROUPED_FLOAT32 = GroupedConfig(32, 32, 32, 4, 2, swapped=False)
# Tiles have GROUP columns: the kernel quantises each row of a tile's `silu(gate) * up` as one group.
GROUPED_FP8_BY_MAX_ROWS = {
    16: GroupedConfig(16, GROUP, GROUP, 4, 3, swapped=True, programs_per_sm=4),
    32: GroupedConfig(32, GROUP, GROUP, 4, 3, swapped=True),
}
# Used for more rows per expert if `gluon_grouped` does not support the weights or the device.
GROUPED_FP8_OF_MORE_ROWS = GroupedConfig(128, GROUP, GROUP, 8, 4, swapped=False, programs_per_sm=1)


def grouped_config(num_pairs: int, num_all_experts: int, *, is_float32: bool, is_block_fp8: bool) -> GroupedConfig:
    """Return the tile for `num_pairs` (token, expert) pairs. Both numbers include all ranks."""
    if is_float32:
        return GROUPED_FLOAT32
    table, config_of_more_rows = GROUPED_BY_MAX_ROWS, GROUPED_OF_MORE_ROWS
    if is_block_fp8:
        table, config_of_more_rows = GROUPED_FP8_BY_MAX_ROWS, GROUPED_FP8_OF_MORE_ROWS
    average_rows = num_pairs / num_all_experts
    return next((config for max_rows, config in table.items() if average_rows <= max_rows), config_of_more_rows)


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the maximum number of tiles. A tile has up to `block_m` pairs of one of this rank's experts."""
    return min(num_pairs, num_pairs // block_m + min(num_experts, num_pairs))
