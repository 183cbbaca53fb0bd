"""Defines launch configurations of our GEMM kernels, and rules that choose between our kernels and cuBLAS.

The constants were measured on one H200 in bf16, with uncached weights. A weight is [num_columns, depth].
"""

from typing import NamedTuple

# Maximum number of weight elements for which `triton_few_rows` is faster than cuBLAS. Keys: results of `padded_rows`.
MAX_FEW_ROWS_ELEMENTS = {1: 1 << 62, 2: 1 << 62, 4: 1 << 24, 8: 1 << 23}
# Bounds on a weight's size that define the kinds of weight in FEW_ROWS_CONFIGS.
MAX_NARROW_COLUMNS = 2048
MAX_DEEP_COLUMNS = 4096
MIN_DEEP_DEPTH = 4096
MIN_VOCABULARY_COLUMNS = 1 << 16

# `triton_split_k` splits the sum over K among CTAs. It is faster than cuBLAS for weights and rows within these bounds.
MAX_SPLIT_COLUMNS = 1024
MIN_SPLIT_DEPTH = 2048
MAX_SPLIT_ROWS = 256
# A weight's columns and depth must be multiples of these numbers, so that all tiles of SPLIT_CONFIGS are whole.
SPLIT_COLUMNS_MULTIPLE = 64
SPLIT_DEPTH_MULTIPLE = 512


class FewRowsConfig(NamedTuple):
    """Tile of `triton_few_rows`. block_n: output columns per CTA."""

    block_n: int
    num_warps: int


# Tiles by kind of weight, then by number of rows rounded up to a power of two.
FEW_ROWS_CONFIGS = {
    "narrow": {1: FewRowsConfig(2, 8), 2: FewRowsConfig(2, 8), 4: FewRowsConfig(2, 8), 8: FewRowsConfig(4, 4)},
    "deep": {1: FewRowsConfig(2, 4), 2: FewRowsConfig(4, 4), 4: FewRowsConfig(8, 4), 8: FewRowsConfig(4, 4)},
    "gated": {1: FewRowsConfig(4, 2), 2: FewRowsConfig(4, 2), 4: FewRowsConfig(4, 2), 8: FewRowsConfig(2, 1)},
    "wide": {1: FewRowsConfig(8, 4), 2: FewRowsConfig(8, 4), 4: FewRowsConfig(8, 4), 8: FewRowsConfig(8, 2)},
    "vocabulary": {1: FewRowsConfig(4, 2), 2: FewRowsConfig(4, 2), 4: FewRowsConfig(4, 2), 8: FewRowsConfig(4, 2)},
}


def is_few_rows_faster(num_rows: int, num_columns: int, depth: int) -> bool:
    """Whether `triton_few_rows` is faster than a separate norm followed by cuBLAS."""
    return num_columns * depth <= MAX_FEW_ROWS_ELEMENTS.get(padded_rows(num_rows), 0)


def padded_rows(num_rows: int) -> int:
    """Return `num_rows` rounded up to a power of two, and 0 for 0."""
    return 1 << (num_rows - 1).bit_length() if num_rows else 0


def few_rows_config(num_rows: int, num_columns: int, depth: int, *, gated: bool) -> FewRowsConfig:
    """Return the tile of `triton_few_rows` for up to 8 rows. num_columns: output columns."""
    if gated:
        kind = "gated"
    elif num_columns <= MAX_NARROW_COLUMNS:
        kind = "narrow"
    elif num_columns <= MAX_DEEP_COLUMNS and depth >= MIN_DEEP_DEPTH:
        kind = "deep"
    elif num_columns >= MIN_VOCABULARY_COLUMNS:
        kind = "vocabulary"
    else:
        kind = "wide"
    return FEW_ROWS_CONFIGS[kind][padded_rows(num_rows)]


class SplitConfig(NamedTuple):
    """Tile of a launch that splits K into `num_splits` parts."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


# Tiles by maximum number of rows.
SPLIT_CONFIGS = {
    16: SplitConfig(16, 32, 128, 4, 4, 6),
    32: SplitConfig(32, 32, 128, 4, 4, 6),
    64: SplitConfig(64, 32, 128, 4, 4, 6),
    128: SplitConfig(64, 32, 128, 2, 4, 6),
    MAX_SPLIT_ROWS: SplitConfig(64, 64, 128, 2, 8, 4),
}


def split_config(num_rows: int) -> SplitConfig:
    """Return the tile for a launch that splits K, with up to MAX_SPLIT_ROWS rows."""
    return next(config for max_rows, config in SPLIT_CONFIGS.items() if num_rows <= max_rows)


def is_split_faster(num_columns: int, depth: int) -> bool:
    """Whether splitting K is faster than cuBLAS for up to MAX_SPLIT_ROWS rows and a 16-bit weight of this size."""
    if num_columns > MAX_SPLIT_COLUMNS or depth < MIN_SPLIT_DEPTH:
        return False
    return num_columns % SPLIT_COLUMNS_MULTIPLE == 0 and depth % SPLIT_DEPTH_MULTIPLE == 0


def num_split_counters(num_columns: int) -> int:
    """Return the number of counters of a weight: the maximum number of output tiles in a launch that splits K."""
    return max(
        -(-max_rows // config.block_m) * (num_columns // config.block_n) for max_rows, config in SPLIT_CONFIGS.items()
    )


class BlockFP8Config(NamedTuple):
    """Tile of a block FP8 launch that splits K into `num_splits` parts. block_n: output columns per CTA."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


# Up to this number of rows, the product's kernel also quantises the rows, unless a norm comes first.
MAX_FUSED_FP8_ROWS = 16
# Up to this number of rows, `triton_block_fp8` is faster than cuBLAS for at most MAX_NARROW_FP8_COLUMNS columns.
MAX_FP8_ROWS = 128
MAX_NARROW_FP8_COLUMNS = 4096
# Like MAX_FP8_ROWS, for more than MAX_NARROW_FP8_COLUMNS columns.
MAX_WIDE_FP8_ROWS = 64
# The sum over K is split into more parts until a launch has at least this number of CTAs.
MIN_FP8_CTAS = 128
# Like MIN_FP8_CTAS, for a launch whose kernel also quantises rows. Also the minimum for WIDE_FP8_CONFIGS.
MIN_FUSED_FP8_CTAS = 192
# Minimum number of groups (128 elements that share a scale) per part of K.
MIN_FP8_GROUPS = 4
MAX_FP8_SPLITS = 8  # maximum number of parts of K
# Gated launches have fewer pipeline stages, because each stage holds two tiles of the weight.
GATED_FP8_STAGES = 4
# Tiles by maximum number of rows.
FP8_CONFIGS = {
    MAX_FUSED_FP8_ROWS: BlockFP8Config(16, 64, 1, 4, 4),
    32: BlockFP8Config(32, 64, 1, 4, 6),
    64: BlockFP8Config(64, 64, 1, 4, 6),
    MAX_FP8_ROWS: BlockFP8Config(64, 64, 1, 4, 6),
}
# Wider tiles by maximum number of rows, used if a launch still has enough CTAs.
WIDE_FP8_CONFIGS = {MAX_FUSED_FP8_ROWS: BlockFP8Config(16, 128, 1, 4, 4), 64: BlockFP8Config(64, 128, 1, 4, 3)}
MANY_ROWS_FP8_CONFIG = BlockFP8Config(128, 128, 1, 8, 4)


def block_fp8_config(
    num_rows: int, num_columns: int, num_groups: int, *, gated: bool, may_split: bool
) -> BlockFP8Config:
    """Return the tile for `num_columns` output columns and `num_groups` groups of 128 along K.

    may_split: whether the sum over K may be split among CTAs.
    """
    if num_rows > MAX_FP8_ROWS:
        return MANY_ROWS_FP8_CONFIG._replace(block_n=64) if gated else MANY_ROWS_FP8_CONFIG
    max_rows = next(max_rows for max_rows in FP8_CONFIGS if num_rows <= max_rows)
    is_fused = max_rows == MAX_FUSED_FP8_ROWS
    config, min_ctas = FP8_CONFIGS[max_rows], MIN_FUSED_FP8_CTAS if is_fused else MIN_FP8_CTAS
    max_splits = 1
    while may_split and max_splits < MAX_FP8_SPLITS and num_groups >= 2 * max_splits * MIN_FP8_GROUPS:
        max_splits *= 2
    if gated:
        config = config._replace(num_stages=GATED_FP8_STAGES)
    elif (wide_config := WIDE_FP8_CONFIGS.get(max_rows)) is not None:
        num_ctas = -(-num_columns // wide_config.block_n) * (max_splits if is_fused else 1)
        if num_ctas >= MIN_FUSED_FP8_CTAS or (is_fused and not may_split):
            config = wide_config
    num_ctas = -(-num_rows // config.block_m) * -(-num_columns // config.block_n)
    num_splits = 1
    while num_splits < max_splits and num_ctas * num_splits < min_ctas:
        num_splits *= 2
    return config._replace(num_splits=num_splits)


def is_triton_fp8_faster(num_rows: int, num_columns: int) -> bool:
    """Whether `triton_block_fp8` is faster than cuBLAS."""
    return num_rows <= (MAX_FP8_ROWS if num_columns <= MAX_NARROW_FP8_COLUMNS else MAX_WIDE_FP8_ROWS)


def num_fp8_counters(num_columns: int) -> int:
    """Return the number of counters of a weight: the maximum number of output tiles in a launch that splits K."""
    return max(
        -(-max_rows // config.block_m) * -(-num_columns // config.block_n) for max_rows, config in FP8_CONFIGS.items()
    )
