"""Launch configurations of our GEMM kernels, and rules for when they beat a library: nothing is tuned at run time.

The constants were measured on one H200 in bf16 with cold weights. The baseline runs norm, cuBLAS and gate as separate
kernels.
"""

from typing import NamedTuple

# Largest weight (in elements) for which the few-row kernel is faster, by rows rounded up to a power of two.
MOST_ELEMENTS = {1: 1 << 62, 2: 1 << 62, 4: 1 << 24, 8: 1 << 23}
# With at most this many columns each CTA takes few of them, so that every SM has work.
FEW_COLUMNS = 2048
# With at most this many columns each CTA still takes few of them if K is at least LONG.
SOME_COLUMNS = 4096
LONG = 4096
# From this many columns on (a vocabulary) a launch has many waves of CTAs.
VAST_COLUMNS = 1 << 16


# Splitting K pays for weights with at most this many columns and at least this depth, for up to SPLIT_ROWS rows.
SPLIT_COLUMNS = 1024
SPLIT_DEPTH = 2048
SPLIT_ROWS = 256
# Columns and K must be multiples of these, so that every tile in SPLITS divides them evenly.
COLUMN_STEP = 64
DEPTH_STEP = 512


class RowsConfig(NamedTuple):
    """Tile of a few-row launch: columns of a CTA (pairs of columns when gated), warps."""

    block_n: int
    num_warps: int


NARROW = {1: RowsConfig(2, 8), 2: RowsConfig(2, 8), 4: RowsConfig(2, 8), 8: RowsConfig(4, 4)}
DEEP = {1: RowsConfig(2, 4), 2: RowsConfig(4, 4), 4: RowsConfig(8, 4), 8: RowsConfig(4, 4)}
GATED = {1: RowsConfig(4, 2), 2: RowsConfig(4, 2), 4: RowsConfig(4, 2), 8: RowsConfig(2, 1)}
WIDE = {1: RowsConfig(8, 4), 2: RowsConfig(8, 4), 4: RowsConfig(8, 4), 8: RowsConfig(8, 2)}
VAST = {1: RowsConfig(4, 2), 2: RowsConfig(4, 2), 4: RowsConfig(4, 2), 8: RowsConfig(4, 2)}


def pays(num_rows: int, num_columns: int, width: int) -> bool:
    """Whether the few-row kernel, which includes the norm, beats a separate norm and cuBLAS. width: K of the weight."""
    return num_columns * width <= MOST_ELEMENTS.get(padded(num_rows), 0)


def padded(num_rows: int) -> int:
    """Return the number of rows that a launch computes: the next power of two, or 0."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


def rows_config(num_rows: int, num_columns: int, width: int, *, gated: bool) -> RowsConfig:
    """Return the tile for up to 8 rows and `num_columns` columns, with sums over `width`."""
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
    """Tile of a launch that splits K: rows, columns, depth, parts of K, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int
    num_stages: int


# Keys: upper bound on the number of rows.
SPLITS = {
    16: SplitConfig(16, 32, 128, 4, 4, 6),
    32: SplitConfig(32, 32, 128, 4, 4, 6),
    64: SplitConfig(64, 32, 128, 4, 4, 6),
    128: SplitConfig(64, 32, 128, 2, 4, 6),
    SPLIT_ROWS: SplitConfig(64, 64, 128, 2, 8, 4),
}


def split_config(num_rows: int) -> SplitConfig:
    """Return the tile for up to SPLIT_ROWS rows."""
    return next(config for most, config in SPLITS.items() if num_rows <= most)


def can_split(num_columns: int, width: int) -> bool:
    """Whether splitting K beats a library's product of up to SPLIT_ROWS rows with a 16-bit weight [num_columns, width].

    `pays` has precedence.
    """
    if num_columns > SPLIT_COLUMNS or width < SPLIT_DEPTH:
        return False
    return num_columns % COLUMN_STEP == 0 and width % DEPTH_STEP == 0


def num_counters(num_columns: int) -> int:
    """Return the number of counters that a launch needs: one per tile of the largest launch that splits K."""
    return max(-(-most // config.block_m) * (num_columns // config.block_n) for most, config in SPLITS.items())


class BlockFP8Config(NamedTuple):
    """Tile of a block FP8 launch: rows, columns (pairs of columns when gated), parts of K, warps, pipeline stages.

    Each tile covers 128 elements of K: one group of scales.
    """

    block_m: int
    block_n: int
    splits: int
    num_warps: int
    num_stages: int


# Maximum number of rows that the kernel quantises itself, if no norm precedes. On an H200, 4096 x 4096 with one row
# takes 10.7 us this way, and 14.4 us with a separate quantising kernel. After a norm the separate kernel is faster.
FUSED_FP8_ROWS = 16
# Our kernel computes at most OWN_FP8_ROWS rows for weights of up to FEW_FP8_COLUMNS columns, and OWN_WIDE_FP8_ROWS for
# wider weights. With more rows cuBLAS is faster, if it supports the shape.
OWN_FP8_ROWS = 128
FEW_FP8_COLUMNS = 4096
OWN_WIDE_FP8_ROWS = 64
# K is split until a launch has FP8_CTAS CTAs, or FUSED_FP8_CTAS with at most FUSED_FP8_ROWS rows. Each CTA keeps at
# least LEAST_GROUPS groups.
FUSED_FP8_CTAS = 192
FP8_CTAS = 128
LEAST_GROUPS = 4
MOST_FP8_SPLITS = 8
# Pipeline stages when gated: pairs of tiles must leave space for several CTAs per SM.
GATED_FP8_STAGES = 4
# Keys: upper bound on the number of rows.
FP8_ROWS = {
    FUSED_FP8_ROWS: BlockFP8Config(16, 64, 1, 4, 4),
    32: BlockFP8Config(32, 64, 1, 4, 6),
    64: BlockFP8Config(64, 64, 1, 4, 6),
    OWN_FP8_ROWS: BlockFP8Config(64, 64, 1, 4, 6),
}
# Tiles with twice as many columns, used if a launch still has enough CTAs.
WIDE_FP8_ROWS = {
    FUSED_FP8_ROWS: BlockFP8Config(16, 128, 1, 4, 4),
    64: BlockFP8Config(64, 128, 1, 4, 3),
}
FP8_MANY = BlockFP8Config(128, 128, 1, 8, 4)


def block_fp8_config(num_rows: int, num_columns: int, groups: int, *, gated: bool, may_split: bool) -> BlockFP8Config:
    """Return the tile for a weight of `num_columns` (pairs when gated) and `groups` of 128 along K."""
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
    """Whether our kernel beats the library's product of `num_rows` rows with a weight of `num_columns` columns."""
    return num_rows <= (OWN_FP8_ROWS if num_columns <= FEW_FP8_COLUMNS else OWN_WIDE_FP8_ROWS)


def num_fp8_counters(num_columns: int) -> int:
    """Return the number of counters that a launch needs, as `num_counters` does."""
    return max(-(-most // config.block_m) * -(-num_columns // config.block_n) for most, config in FP8_ROWS.items())
