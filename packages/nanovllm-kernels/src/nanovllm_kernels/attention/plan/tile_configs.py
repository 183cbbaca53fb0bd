"""Defines launch configurations of the attention kernels by head size and dtype. Nothing is tuned at run time."""

from typing import NamedTuple

# Minimum number of keys in a part of a work list. With shorter parts, merging the parts' results would take more time
# than the additional programs save.
MIN_PART_TOKENS = 128
# Rows of a narrow tile: the number of rows of the tensor core instruction `mma`.
NARROW_TILE_ROWS = 16
# Number of registers of an SM, on every architecture from Ampere to Hopper.
SM_REGISTERS = 65536


class TileConfig(NamedTuple):
    """Configures a launch.

    block_m: rows per tile of queries. A row is one query of one head.
    block_n: keys per block. A tile attends to one block after another.
    ctas_per_sm: number of programs that an SM runs at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int

    @property
    def max_registers(self) -> int:
        """The most registers that a thread may use so that an SM holds `ctas_per_sm` programs."""
        return min(255, SM_REGISTERS // (32 * self.num_warps * self.ctas_per_sm) // 8 * 8)


# Tiles of grouped-query attention, by padded head size. Narrow tiles are for few queries per request, wide tiles for
# many.
NARROW_16_BIT = {64: TileConfig(16, 128, 4, 5, 3), 128: TileConfig(16, 128, 4, 3, 2), 256: TileConfig(16, 32, 4, 5, 3)}
WIDE_16_BIT = {64: TileConfig(128, 64, 4, 3, 2), 128: TileConfig(128, 64, 8, 3, 1), 256: TileConfig(64, 32, 4, 2, 1)}
# Tiles for FP8 caches. Kernels convert the elements to float16.
NARROW_8_BIT = {64: TileConfig(16, 128, 4, 5, 3), 128: TileConfig(16, 128, 4, 4, 3), 256: TileConfig(16, 64, 4, 4, 3)}
WIDE_8_BIT = {
    # For heads of 64, Triton 3.6 miscompiles kernels with 64 or 128 keys per block.
    64: TileConfig(128, 32, 4, 3, 2),
    128: TileConfig(128, 64, 8, 3, 1),
    256: TileConfig(64, 32, 4, 2, 1),
}
# float32 products run without tensor cores. These tiles are not tuned.
NARROW_32_BIT = {64: TileConfig(16, 32, 4, 2, 2), 128: TileConfig(16, 32, 4, 2, 2), 256: TileConfig(16, 16, 4, 2, 2)}
WIDE_32_BIT = {64: TileConfig(32, 32, 4, 2, 2), 128: TileConfig(32, 32, 4, 2, 2), 256: TileConfig(32, 16, 4, 2, 1)}
# Tiles by element size in bytes, then by padded head size.
NARROW_TILES = {1: NARROW_8_BIT, 2: NARROW_16_BIT, 4: NARROW_32_BIT}
WIDE_TILES = {1: WIDE_8_BIT, 2: WIDE_16_BIT, 4: WIDE_32_BIT}

# Tiles of absorbed attention (directly over latents): entry 16 is the narrow tile, entry 64 the wide tile.
LATENT_16_BIT = {16: TileConfig(16, 32, 4, 5, 2), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_8_BIT = {16: TileConfig(16, 64, 8, 5, 1), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_32_BIT = {16: TileConfig(16, 16, 4, 2, 1), 64: TileConfig(16, 16, 4, 2, 1)}
LATENT_TILES = {1: LATENT_8_BIT, 2: LATENT_16_BIT, 4: LATENT_32_BIT}
# Query heads in a tile of `gluon_absorbed`.
GLUON_TILE_HEADS = 64
# Tiles of latent attention over expanded keys (192 elements) and values (128 elements), by element size in bytes.
EXPANDED_TILES = {2: TileConfig(128, 64, 8, 3, 1), 4: TileConfig(32, 16, 4, 2, 1)}


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two >= `number`. Requires `number` >= 1."""
    return 1 << (number - 1).bit_length()


def choose_num_parts(num_head_blocks: int, num_programs: int) -> int:
    """Return the largest number of parts whose programs all run at once. A part has one program per block of heads."""
    return max(1, num_programs // num_head_blocks)


def min_part_blocks(config: TileConfig) -> int:
    """Return the minimum number of key blocks in a part of a work list."""
    return -(-MIN_PART_TOKENS // config.block_n)


def tile_element_bytes(query_element_bytes: int, cache_element_bytes: int) -> int:
    """Return the size in bytes that selects a tile: 4 for float32 queries, otherwise the size of a cache element."""
    return 4 if query_element_bytes == 4 else cache_element_bytes


def gqa_tile_config(head_dim: int, element_bytes: int, group_size: int, *, many_queries: bool) -> TileConfig:
    """Return the tile for heads of `head_dim`, with `group_size` query heads per key-value head.

    element_bytes: from `tile_element_bytes`. many_queries: whether requests have many queries, instead of a few.
    Raises: ValueError if no kernel supports the head size.
    """
    padded_dim = max(64, next_power_of_2(head_dim))
    config_by_dim = (WIDE_TILES if many_queries else NARROW_TILES)[element_bytes]
    if padded_dim not in config_by_dim:
        raise ValueError(f"no attention kernel for heads of {head_dim} elements: the maximum is 256")
    config = config_by_dim[padded_dim]
    return config._replace(block_m=max(config.block_m, next_power_of_2(group_size)))


def latent_tile_config(num_heads: int, element_bytes: int, *, many_queries: bool) -> TileConfig:
    """Return the tile of absorbed latent attention with `num_heads` heads and latents of up to 512 elements.

    element_bytes: from `tile_element_bytes`. many_queries: whether requests have many queries, instead of one.
    """
    return LATENT_TILES[element_bytes][64 if many_queries or num_heads > NARROW_TILE_ROWS else NARROW_TILE_ROWS]


def latent_tile_heads(num_heads: int, config: TileConfig) -> int:
    """Return the number of query heads in a tile of absorbed latent attention."""
    return min(next_power_of_2(num_heads), config.block_m)
