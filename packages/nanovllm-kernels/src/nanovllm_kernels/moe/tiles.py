"""How the launches of experts are cut, and which of them there are, from numbers known to the host.

A small table, looked up and never tuned at run time. This room must not know tensors. Chosen by counting bytes and
registers; nothing here was measured on a GPU yet.
"""

from typing import NamedTuple

# Up to so many tokens, the rows of a tile are the tokens themselves, and nothing is sorted.
FEW_TOKENS = 64
# Programs that such a launch should have at least: two for each SM of the largest GPUs, and a few.
ENOUGH_PROGRAMS = 288
# Else its tiles have so few columns, the fewest that tensor cores take; of more rows than SHORT_ROWS they have at most
# twice as many, or two of them wouldn't fit an SM.
LEAST_COLUMNS = 16
SHORT_ROWS = 16
# Of a block FP8 weight the tiles are as deep as a scale's reach.
GROUP = 128


class FewConfig(NamedTuple):
    """How a launch for few tokens is tiled: columns and depth of a tile, warps, tiles on their way at once; and whether
    columns and rows change places.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool


class GroupedConfig(NamedTuple):
    """How a grouped product is tiled: rows (pairs of a token and an expert), columns, depth, warps, tiles on their way;
    and whether columns and rows change places, so that the tensor cores' long side lies along the weight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool


def few_config(num_rows: int, num_groups: int, num_columns: int, *, wide: bool, quantized: bool) -> FewConfig:
    """The tiling of `num_columns` results a row for `num_groups` experts, `num_rows` rows a tile. wide: numbers of 4
    bytes. quantized: block FP8.
    """
    sizes = (64, 32) if num_rows <= SHORT_ROWS or quantized else (32,)
    enough = ENOUGH_PROGRAMS // 2 if quantized else ENOUGH_PROGRAMS
    block_n = next((n for n in sizes if num_groups * -(-num_columns // n) >= enough), LEAST_COLUMNS)
    if quantized:
        # Hopper multiplies e4m3 as it is where the left operand has 64 rows, and else turns it into float16 first.
        return FewConfig(block_n, GROUP, 4, 4 if num_rows <= SHORT_ROWS else 3, block_n >= 64 > num_rows)
    if wide:
        return FewConfig(block_n, 32, 4, 2, swapped=False)
    return FewConfig(block_n, 128, 4, 4 if num_rows <= SHORT_ROWS else 3, swapped=False)


# By the most rows that an expert has on average.
GROUPED = {
    16: GroupedConfig(16, 64, 128, 4, 4, swapped=True),
    32: GroupedConfig(32, 64, 128, 4, 4, swapped=True),
    64: GroupedConfig(64, 128, 64, 8, 3, swapped=True),
}
MANY = GroupedConfig(128, 128, 64, 8, 3, swapped=False)
WIDE = GroupedConfig(32, 32, 32, 4, 2, swapped=False)
# A tile's columns are one group of what the next product is to quantise.
GROUPED_FP8 = {
    16: GroupedConfig(16, GROUP, GROUP, 4, 4, swapped=True),
    32: GroupedConfig(32, GROUP, GROUP, 8, 3, swapped=True),
}
MANY_FP8 = GroupedConfig(64, GROUP, GROUP, 8, 3, swapped=True)


def grouped_config(num_pairs: int, num_experts: int, *, wide: bool, quantized: bool) -> GroupedConfig:
    """The tiling for `num_pairs` rows of `num_experts`. wide: numbers of 4 bytes. quantized: block FP8."""
    if wide:
        return WIDE
    table, many = (GROUPED_FP8, MANY_FP8) if quantized else (GROUPED, MANY)
    average = num_pairs / num_experts
    return next((config for most, config in table.items() if average <= most), many)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many tiles of `block_m` rows there may be, each of one expert's rows."""
    return min(num_pairs, num_pairs // block_m + min(num_experts, num_pairs))


def num_counters(num_columns: int) -> int:
    """How many tiles of columns a launch for few tokens may have at most."""
    return -(-num_columns // LEAST_COLUMNS)
