"""How our kernels' launches are cut and when they are used, from numbers known to the host.

A small table, looked up and never tuned at run time. This room must not know tensors.

Measured on one H200, bf16, weights cold, calls back to back in a CUDA graph, microseconds. The few-row kernel: norm +
cuBLAS (+ gate) against the one kernel.

    columns x K          1 row         2             4             8
    4096 x 1024          6.0 / 4.1     6.7 / 4.6     6.8 / 5.0     6.8 / 6.7
    3072 x 1024, gated   8.8 / 4.9     8.8 / 5.5     8.9 / 6.6     8.9 / 8.1
    1024 x 2048          12 / 2.4      10 / 2.8      9.9 / 3.5     5.9 / 5.5
    1024 x 3072          7.5 / 2.8     7.5 / 3.7     7.6 / 4.5     7.6 / 7.0
    6144 x 4096          17.3 / 13.7   17.1 / 14.6   17.3 / 17.8   17.3 / 31
    14336 x 4096, gated  60.6 / 55.3   60.5 / 59.6   60.8 / 68     61 / 113
    4096 x 4096          13.5 / 9.2    13.3 / 11.1   13.3 / 11.6   13.4 / 17
    4096 x 14336         32.6 / 28.4   32.9 / 31.8   32.9 / 32.3   33 / 49
    151936 x 1024        78.7 / 71.7   79.0 / 73.6   80.1 / 98     81 / 204
    128256 x 4096        249 / 235     249 / 234     252 / 260     253 / 423

The kernel that splits K, with a residual: cuBLAS / it.

    columns x K          16 rows       32            64            128           256
    1024 x 2048          7.6 / 4.6     7.6 / 5.1     7.7 / 5.7     8.0 / 5.8     8.6 / 7.6
    1024 x 3072          8.4 / 5.5     8.5 / 6.1     8.8 / 6.2     8.9 / 7.7     9.7 / 9.0
    4096 x 4096          14.8 / 14.6                 14.4 / 15.5                 20 / 28

Not used, for they lost everywhere to cuBLAS with the norm before it and the gate behind it as kernels of their own: the
same without a split for weights of many columns, and with the norm within the loop (2 x the time).
"""

from typing import NamedTuple

# The most elements of a weight for which the kernel wins, by rows rounded up to a power of two; none for more rows.
MOST_ELEMENTS = {1: 1 << 62, 2: 1 << 62, 4: 1 << 24, 8: 1 << 23}
# Up to so many columns, a CTA takes as few as it can, or there wouldn't be work for every SM.
FEW_COLUMNS = 2048
# Up to so many it still takes fewer of them where each is long.
SOME_COLUMNS = 4096
LONG = 4096
# A vocabulary: work for many waves of CTAs.
VAST_COLUMNS = 1 << 16


# A weight so narrow and so deep is worth splitting along K, for up to so many rows.
SPLIT_COLUMNS = 1024
SPLIT_DEPTH = 2048
SPLIT_ROWS = 256
# What any of SPLITS below divides evenly: the columns, and K.
COLUMN_STEP = 64
DEPTH_STEP = 512


class RowsConfig(NamedTuple):
    """How one launch is tiled: columns of a CTA (pairs of them when gated), warps."""

    block_n: int
    num_warps: int


NARROW = {1: RowsConfig(2, 8), 2: RowsConfig(2, 8), 4: RowsConfig(2, 8), 8: RowsConfig(4, 4)}
DEEP = {1: RowsConfig(2, 4), 2: RowsConfig(4, 4), 4: RowsConfig(8, 4), 8: RowsConfig(4, 4)}
GATED = {1: RowsConfig(4, 2), 2: RowsConfig(4, 2), 4: RowsConfig(4, 2), 8: RowsConfig(2, 1)}
WIDE = {1: RowsConfig(8, 4), 2: RowsConfig(8, 4), 4: RowsConfig(8, 4), 8: RowsConfig(8, 2)}
VAST = {1: RowsConfig(4, 2), 2: RowsConfig(4, 2), 4: RowsConfig(4, 2), 8: RowsConfig(4, 2)}


def pays(num_rows: int, num_columns: int, width: int) -> bool:
    """Whether the kernel beats a norm and a library's product of `num_rows` and a weight [num_columns, width]."""
    return num_columns * width <= MOST_ELEMENTS.get(padded(num_rows), 0)


def padded(num_rows: int) -> int:
    """The rows that a launch computes: the next power of two, 0 for none."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


def rows_config(num_rows: int, num_columns: int, width: int, *, gated: bool) -> RowsConfig:
    """The tiling for up to 8 rows and `num_columns` results a row, each a sum over `width`."""
    if gated:
        table = GATED
    elif num_columns <= FEW_COLUMNS:
        table = NARROW
    elif num_columns <= SOME_COLUMNS and width >= LONG:
        table = DEEP
    elif num_columns >= VAST_COLUMNS:
        table = VAST
    else:
        table = WIDE
    return table[padded(num_rows)]


class SplitConfig(NamedTuple):
    """How one launch is tiled: rows, columns and depth of a tile, parts of K, warps, tiles on their way at once."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


# By the most rows.
SPLITS = {
    16: SplitConfig(16, 32, 128, 4, 4, 6),
    32: SplitConfig(32, 32, 128, 4, 4, 6),
    64: SplitConfig(64, 32, 128, 4, 4, 6),
    128: SplitConfig(64, 32, 128, 2, 4, 6),
    SPLIT_ROWS: SplitConfig(64, 64, 128, 2, 8, 4),
}


def split_config(num_rows: int) -> SplitConfig:
    """The tiling for up to SPLIT_ROWS rows."""
    return next(config for most, config in SPLITS.items() if num_rows <= most)


def can_split(num_columns: int, width: int) -> bool:
    """Whether splitting K beats a library's product of up to SPLIT_ROWS rows, which `pays` has refused, and a weight
    [num_columns, width] of 16-bit numbers.
    """
    if num_columns > SPLIT_COLUMNS or width < SPLIT_DEPTH:
        return False
    return num_columns % COLUMN_STEP == 0 and width % DEPTH_STEP == 0


def num_counters(num_columns: int) -> int:
    """How many tiles a launch may have at most."""
    return max(-(-most // config.block_m) * (num_columns // config.block_n) for most, config in SPLITS.items())


class BlockFP8Config(NamedTuple):
    """How one launch over block FP8 is tiled: rows, columns of a tile (pairs of them when gated), parts of K, warps,
    tiles on their way at once. A tile's depth is a group's.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


# Up to so many rows are quantised by the kernel that multiplies them, where no norm comes before. One H200, weights
# cold, us of one row (after a norm), quantised by that kernel and by one of their own: 7168 x 16384 36.0, 37.5; 4096 x
# 4096 10.7, 14.4; after a norm, which such a kernel did too, 28672 x 4096, gated, 50, 34; 12288 x 2048 22.6, 13.0.
FUSED_FP8_ROWS = 16
# With more rows than this the product is the library's, where it takes it; of more than FEW_FP8_COLUMNS columns it is
# with more than OWN_WIDE_FP8_ROWS.
OWN_FP8_ROWS = 128
FEW_FP8_COLUMNS = 4096
OWN_WIDE_FP8_ROWS = 64
# K is split until there are so many CTAs (the first for up to FUSED_FP8_ROWS rows), while each has LEAST_GROUPS groups.
FUSED_FP8_CTAS = 192
FP8_CTAS = 128
LEAST_GROUPS = 4
MOST_FP8_SPLITS = 8
# Pairs of tiles, when gated, are on their way at once for as long as several CTAs find room on an SM.
GATED_FP8_STAGES = 4
# By the most rows. One H200, weights cold, microseconds with rows quantised, ours as it is tiled here (and cuBLAS with
# the same); of 128 rows and many columns, where cuBLAS is taken, the best tiling of ours.
#
#     columns x K      12288 x 2048  2048 x 4096  8192 x 3072  3072 x 6144  24576 x 1536  7168 x 16384  28672 x 4096
#     1 row            11.8          7.6          11.4         11.6         14.6          36.5          35.2
#     64 rows          12.5 (13.9)   11.0 (16.2)  15.2 (14.6)  14.1 (21.5)  15.2 (18.4)   41.4 (53.3)   36.5 (41.9)
#     128 rows         15.4 (12.6)   13.1 (17.3)  16.7 (15.6)  18.2 (22.8)  25.2 (18.2)   58.5 (52.9)   51.9 (39.5)
FP8_ROWS = {
    FUSED_FP8_ROWS: BlockFP8Config(16, 64, 1, 4, 4),
    32: BlockFP8Config(32, 64, 1, 4, 6),
    64: BlockFP8Config(64, 64, 1, 4, 6),
    OWN_FP8_ROWS: BlockFP8Config(64, 64, 1, 4, 6),
}
# Instead, where columns make up for CTAs of twice as many.
WIDE_FP8_ROWS = {
    FUSED_FP8_ROWS: BlockFP8Config(16, 128, 1, 4, 4),
    64: BlockFP8Config(64, 128, 1, 4, 3),
}
FP8_MANY = BlockFP8Config(128, 128, 1, 8, 4)


def block_fp8_config(num_rows: int, num_columns: int, groups: int, *, gated: bool, may_split: bool) -> BlockFP8Config:
    """The tiling for a weight of `num_columns` (pairs of them when gated) and `groups` of 128 along K."""
    if num_rows > OWN_FP8_ROWS:
        return FP8_MANY._replace(block_n=64) if gated else FP8_MANY
    most = next(most for most in FP8_ROWS if num_rows <= most)
    few = most == FUSED_FP8_ROWS
    config, enough = FP8_ROWS[most], FUSED_FP8_CTAS if few else FP8_CTAS
    most_splits = 1
    while may_split and most_splits < MOST_FP8_SPLITS and groups >= 2 * most_splits * LEAST_GROUPS:
        most_splits *= 2
    if gated:
        config = config._replace(num_stages=GATED_FP8_STAGES)
    elif (wide := WIDE_FP8_ROWS.get(most)) is not None:
        ctas = -(-num_columns // wide.block_n) * (most_splits if few else 1)
        if ctas >= FUSED_FP8_CTAS or (few and not may_split):
            config = wide
    ctas = -(-num_rows // config.block_m) * -(-num_columns // config.block_n)
    splits = 1
    while splits < most_splits and ctas * splits < enough:
        splits *= 2
    return config._replace(splits=splits)


def owns_fp8(num_rows: int, num_columns: int) -> bool:
    """Whether ours beats the library's product of `num_rows` and a weight of so many columns."""
    return num_rows <= (OWN_FP8_ROWS if num_columns <= FEW_FP8_COLUMNS else OWN_WIDE_FP8_ROWS)


def num_fp8_counters(num_columns: int) -> int:
    """How many tiles a launch that splits K may have at most."""
    return max(-(-most // config.block_m) * -(-num_columns // config.block_n) for most, config in FP8_ROWS.items())
