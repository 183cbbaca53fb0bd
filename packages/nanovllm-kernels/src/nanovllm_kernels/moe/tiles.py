"""How the launches of experts are cut, and which of them there are, from numbers known to the host.

A small table, looked up and never tuned at run time. This room must not know tensors.

Measured on one H200, weights cold, calls back to back in a CUDA graph, microseconds. In block FP8, experts chosen at
random of 512 of 2048 x 512 (10 a token; A), of 256 of 3072 x 1536 (8; B) and of 256 of 7168 x 2048 (8; C):

    tokens    1      4      8      16 few / grouped    64       256
    A         24     48     90     133 / 131           305      415
    B         44     123    239    398 / 369           765      890
    C         102    349    616    1110 / 975          2244

The figures for 8 tokens, and of C for one, are of four tiles on their way in all sums; of three in the shorter ones
there are none. Those for one token are of the kernels for few, which it no longer takes in FP8: those of its own take
18.6 for A and its shared expert, 41 for B.

Many tokens, with A's shared expert, by warps of one job / of different ones (rows an expert):

    tokens    512                768           1024               1536              8192
    A         430 / 451 (11)     488 / 459     503 / 471          720 / 496 (33)    1554 / 1071 (176)
    B         951 / 910 (16)                   1040 / 934         1243 / 963        3234 / 2597 (256)
    C         3154 / 2753 (16)                 3509 / 2856 (32)                     9466 / 8628 (256)

In bf16, B took 63, 207, - and 640 us few, and 1625 for 64 tokens few where 256 took 1640 grouped.
"""

from typing import NamedTuple

# Up to so many tokens, the rows of a tile are the tokens themselves, and nothing is sorted; and up to so many where
# weights are block FP8, for which each program quantises all rows.
FEW_TOKENS = 32
FEW_TOKENS_FP8 = 8
# Programs that such a launch, if not of FP8, should have at least: two for each SM of the largest GPUs, and a few.
ENOUGH_PROGRAMS = 288
# Else its tiles have so few columns, the fewest that tensor cores take; of more rows than SHORT_ROWS they have at most
# twice as many, or two of them wouldn't fit an SM.
LEAST_COLUMNS = 16
SHORT_ROWS = 16
# Of a block FP8 weight the tiles are as deep as a scale's reach.
GROUP = 128
# For one token a program has so many columns, a divisor of a scale's reach, and at most so many weights on their way at
# once.
ONE_COLUMNS = 4
ONE_TILE = 16 * 1024
# Its sums over more than so much are of eight warps rather than four.
ONE_DEEP = 2048
# Sums over so much and up have four tiles on their way rather than three.
DEEP = 4096


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
    and whether columns and rows change places, so that the tensor cores' long side lies along the weight. per_sm: how
    many programs there are for each SM, which take one tile after another.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool
    per_sm: int = 2


def takes_few(num_tokens: int, *, quantized: bool) -> bool:
    """Whether so many tokens are few."""
    return num_tokens <= (FEW_TOKENS_FP8 if quantized else FEW_TOKENS)


def few_config(
    num_rows: int, num_groups: int, num_columns: int, depth: int, *, wide: bool, quantized: bool
) -> FewConfig:
    """The tiling of `num_columns` results a row, each a sum over `depth`, for `num_groups` experts, `num_rows` rows a
    tile. wide: numbers of 4 bytes. quantized: block FP8.
    """
    if quantized:
        # Hopper multiplies e4m3 as it is where the left operand has 64 rows, and else turns it into float16 first.
        return FewConfig(64, GROUP, 4, 4 if depth >= DEEP else 3, swapped=True)
    sizes = (64, 32) if num_rows <= SHORT_ROWS else (32,)
    block_n = next((n for n in sizes if num_groups * -(-num_columns // n) >= ENOUGH_PROGRAMS), LEAST_COLUMNS)
    if wide:
        return FewConfig(block_n, 32, 4, 2, swapped=False)
    return FewConfig(block_n, 128, 4, 4 if num_rows <= SHORT_ROWS else 3, swapped=False)


class OneConfig(NamedTuple):
    """How a launch for one token is tiled: columns, groups of 128 of their depth on their way at once, warps."""

    block_n: int
    groups: int
    num_warps: int


def one_config(depth: int, num_parts: int) -> OneConfig:
    """The tiling of sums over `depth`, of which a program has `num_parts` for each of its columns."""
    groups = min(1 << (-(-depth // GROUP) - 1).bit_length(), max(1, ONE_TILE // (ONE_COLUMNS * num_parts * GROUP)))
    return OneConfig(ONE_COLUMNS, groups, 8 if depth > ONE_DEEP else 4)


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
    16: GroupedConfig(16, GROUP, GROUP, 4, 3, swapped=True, per_sm=4),
    32: GroupedConfig(32, GROUP, GROUP, 4, 3, swapped=True),
}
# Where the products aren't specialised.
MANY_FP8 = GroupedConfig(128, GROUP, GROUP, 8, 4, swapped=False, per_sm=1)


def grouped_config(num_pairs: int, num_experts: int, *, wide: bool, quantized: bool) -> GroupedConfig:
    """The tiling for `num_pairs` rows of `num_experts`. wide: numbers of 4 bytes. quantized: block FP8."""
    if wide:
        return WIDE
    table, many = (GROUPED_FP8, MANY_FP8) if quantized else (GROUPED, MANY)
    average = num_pairs / num_experts
    return next((config for most, config in table.items() if average <= most), many)


# The rows of a tile where a product's warps have different jobs, which pays from so many rows an expert on average.
SPECIALIZED_ROWS = 128
LEAST_SPECIALIZED = 16


def specializes(num_pairs: int, num_experts: int, hidden_size: int, width: int) -> bool:
    """Whether products of block FP8 with `num_pairs` rows of `num_experts` have warps with different jobs."""
    whole = hidden_size % (2 * GROUP) == 0 and width % GROUP == 0
    return whole and num_pairs >= LEAST_SPECIALIZED * num_experts


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """How many tiles of `block_m` rows there may be, each of one expert's rows."""
    return min(num_pairs, num_pairs // block_m + min(num_experts, num_pairs))


def num_counters(num_columns: int) -> int:
    """How many tiles of columns a launch for few tokens may have at most."""
    return -(-num_columns // LEAST_COLUMNS)
