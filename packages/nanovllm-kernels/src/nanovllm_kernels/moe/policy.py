"""Launch configurations of the expert kernels, looked up by shape: nothing is tuned at run time.

The constants were measured on one H200 with cold weights, for 256 to 512 experts of 2048 x 512 to 7168 x 2048.
"""

from typing import NamedTuple

# Most tokens for which a tile's rows are the tokens themselves and nothing is sorted. The limit is lower for block FP8,
# because each program quantises all rows.
FEW_TOKENS = 32
FEW_TOKENS_FP8 = 8
# Programs that a launch for few tokens should have, unless FP8: two per SM of the largest GPUs, and some more.
ENOUGH_PROGRAMS = 288
# A launch with fewer programs uses tiles of LEAST_COLUMNS columns, the fewest that tensor cores take. Tiles with more
# than SHORT_ROWS rows have at most twice as many columns, so that two tiles fit an SM.
LEAST_COLUMNS = 16
SHORT_ROWS = 16
# Size of an FP8 scale's block, and depth of FP8 tiles.
GROUP = 128
# Kernels for one token: columns per program (a divisor of GROUP), and most weights that a program loads at once.
ONE_COLUMNS = 4
ONE_TILE = 16 * 1024
# Kernels for one token sum with eight warps instead of four beyond this depth.
ONE_DEEP = 2048
# Sums of at least this depth load four tiles ahead instead of three.
DEEP = 4096


class FewConfig(NamedTuple):
    """Tile of a launch for few tokens: columns, depth, warps, pipeline stages. swapped: columns and rows exchanged."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool


class GroupedConfig(NamedTuple):
    """Tile of a grouped product: rows (pairs of a token and an expert), columns, depth, warps, pipeline stages.

    swapped: columns and rows are exchanged, so that the tensor cores' longer side lies along the weight.
    per_sm: persistent programs per SM.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    swapped: bool
    per_sm: int = 2


def takes_few(num_tokens: int, *, quantized: bool) -> bool:
    """Whether `num_tokens` tokens use the kernels for few tokens."""
    return num_tokens <= (FEW_TOKENS_FP8 if quantized else FEW_TOKENS)


def few_config(
    num_rows: int, num_groups: int, num_columns: int, depth: int, *, wide: bool, quantized: bool
) -> FewConfig:
    """Return the tile for `num_columns` columns of `num_groups` experts.

    num_rows: rows per tile. depth: length of each sum. wide: elements of 4 bytes. quantized: block FP8.
    """
    if quantized:
        # Hopper multiplies e4m3 directly if the left operand has 64 rows; otherwise Triton converts it to float16.
        return FewConfig(64, GROUP, 4, 4 if depth >= DEEP else 3, swapped=True)
    sizes = (64, 32) if num_rows <= SHORT_ROWS else (32,)
    block_n = next((n for n in sizes if num_groups * -(-num_columns // n) >= ENOUGH_PROGRAMS), LEAST_COLUMNS)
    if wide:
        return FewConfig(block_n, 32, 4, 2, swapped=False)
    return FewConfig(block_n, 128, 4, 4 if num_rows <= SHORT_ROWS else 3, swapped=False)


class OneConfig(NamedTuple):
    """Tile of a launch for one token: columns, groups of 128 of the depth that are loaded at once, warps."""

    block_n: int
    groups: int
    num_warps: int


def one_config(depth: int, num_parts: int) -> OneConfig:
    """Return the tile for sums over `depth`; each of a program's columns has `num_parts` weights rows."""
    groups = min(1 << (-(-depth // GROUP) - 1).bit_length(), max(1, ONE_TILE // (ONE_COLUMNS * num_parts * GROUP)))
    return OneConfig(ONE_COLUMNS, groups, 8 if depth > ONE_DEEP else 4)


# Keys: upper bound on the average number of rows per expert.
GROUPED = {
    16: GroupedConfig(16, 64, 128, 4, 4, swapped=True),
    32: GroupedConfig(32, 64, 128, 4, 4, swapped=True),
    64: GroupedConfig(64, 128, 64, 8, 3, swapped=True),
}
MANY = GroupedConfig(128, 128, 64, 8, 3, swapped=False)
WIDE = GroupedConfig(32, 32, 32, 4, 2, swapped=False)
# A tile's columns form one group, so that the kernel can quantise the group for the next product.
GROUPED_FP8 = {
    16: GroupedConfig(16, GROUP, GROUP, 4, 3, swapped=True, per_sm=4),
    32: GroupedConfig(32, GROUP, GROUP, 4, 3, swapped=True),
}
# For shapes that `specializes` refuses.
MANY_FP8 = GroupedConfig(128, GROUP, GROUP, 8, 4, swapped=False, per_sm=1)


def grouped_config(num_pairs: int, num_experts: int, *, wide: bool, quantized: bool) -> GroupedConfig:
    """Return the tile for `num_pairs` rows of `num_experts`. wide: elements of 4 bytes. quantized: block FP8."""
    if wide:
        return WIDE
    table, many = (GROUPED_FP8, MANY_FP8) if quantized else (GROUPED, MANY)
    average = num_pairs / num_experts
    return next((config for most, config in table.items() if average <= most), many)


# Rows of a tile of the warp-specialised kernel, and the average rows per expert from which this kernel is faster.
SPECIALIZED_ROWS = 128
LEAST_SPECIALIZED = 16


def specializes(num_pairs: int, num_experts: int, hidden_size: int, width: int) -> bool:
    """Whether block FP8 products of `num_pairs` rows of `num_experts` use the warp-specialised kernel."""
    whole = hidden_size % (2 * GROUP) == 0 and width % GROUP == 0
    return whole and num_pairs >= LEAST_SPECIALIZED * num_experts


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return the most tiles of `block_m` rows that there can be, with one expert per tile."""
    return min(num_pairs, num_pairs // block_m + min(num_experts, num_pairs))


def num_counters(num_columns: int) -> int:
    """Return the most column tiles that a launch for few tokens can have."""
    return -(-num_columns // LEAST_COLUMNS)
