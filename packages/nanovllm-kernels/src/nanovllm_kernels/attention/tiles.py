"""Launch configurations of the attention kernels, looked up by shape: nothing is tuned at run time."""

from typing import NamedTuple

# Shorter parts of a work list cost more to merge than they save.
LEAST_PART_TOKENS = 128
# Most rows of a narrow tile: the fewest that tensor cores multiply without wgmma.
NARROW_ROWS = 16
# Multiprocessors assumed by the interpreter, which has no device: those of a small one.
INTERPRETER_SMS = 8


# Registers of an SM, on every architecture from Ampere to Hopper.
SM_REGISTERS = 65536


class TileConfig(NamedTuple):
    """Tile of a launch: rows (positions x group), tokens, warps, pipeline stages, and CTAs per SM."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int

    @property
    def max_registers(self) -> int:
        """Most registers per thread with which an SM holds `ctas_per_sm` CTAs, as work lists assume."""
        return min(255, SM_REGISTERS // (32 * self.num_warps * self.ctas_per_sm) // 8 * 8)


# Keys: padded head size. Two stages hide the look-up of pages; with five, two blocks of keys and values are in flight,
# in 72 KiB of shared memory.
DECODE_16_BIT = {
    64: TileConfig(16, 128, 4, 5, 3),
    128: TileConfig(16, 128, 4, 3, 2),
    256: TileConfig(16, 32, 4, 5, 3),
}
PREFILL_16_BIT = {
    64: TileConfig(128, 64, 4, 3, 2),
    128: TileConfig(128, 64, 8, 3, 1),
    256: TileConfig(64, 32, 4, 2, 1),
}
# Elements of one byte, which are multiplied as float16.
DECODE_8_BIT = {
    64: TileConfig(16, 128, 4, 5, 3),
    128: TileConfig(16, 128, 4, 4, 3),
    256: TileConfig(16, 64, 4, 4, 3),
}
PREFILL_8_BIT = {
    # With 64 or 128 tokens per tile Triton 3.6 generates kernels that fault or give wrong results.
    64: TileConfig(128, 32, 4, 3, 2),
    128: TileConfig(128, 64, 8, 3, 1),
    256: TileConfig(64, 32, 4, 2, 1),
}
# float32 products run without tensor cores: small tiles, chosen for correctness and not for speed.
DECODE_32_BIT = {
    64: TileConfig(16, 32, 4, 2, 2),
    128: TileConfig(16, 32, 4, 2, 2),
    256: TileConfig(16, 16, 4, 2, 2),
}
PREFILL_32_BIT = {
    64: TileConfig(32, 32, 4, 2, 2),
    128: TileConfig(32, 32, 4, 2, 2),
    256: TileConfig(32, 16, 4, 2, 1),
}

# Latents, which are both keys and values, keyed by query heads per tile. Not timed: chosen by Hopper's registers and
# shared memory, so that decodes in 16 bits do not spill.
LATENT_16_BIT = {16: TileConfig(16, 32, 4, 5, 2), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_8_BIT = {16: TileConfig(16, 64, 8, 5, 1), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_32_BIT = {16: TileConfig(16, 16, 4, 2, 1), 64: TileConfig(16, 16, 4, 2, 1)}
LATENT = {1: LATENT_8_BIT, 2: LATENT_16_BIT, 4: LATENT_32_BIT}
# Prompts that are whole in a step, with keys of 192 elements and values of 128.
PLAIN_LATENT = {2: TileConfig(128, 64, 8, 3, 1), 4: TileConfig(32, 16, 4, 2, 1)}


class ProductTile(NamedTuple):
    """Tile of a product: rows, columns, depth, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# From this number of tokens on, our kernel projects queries and results: it skips tokens that need no projection, and
# takes 25 us if none does. cuBLAS is faster per token: 111 us instead of 175 for 1,000 tokens (H200, bf16, 128 heads).
LEAST_COUNTED_TOKENS = 1024
HEADS_TILE = {2: ProductTile(128, 128, 128, 8, 3), 4: ProductTile(32, 32, 32, 4, 2)}
# Persistent programs of that kernel.
HEADS_PROGRAMS = 528

DECODE = {1: DECODE_8_BIT, 2: DECODE_16_BIT, 4: DECODE_32_BIT}
PREFILL = {1: PREFILL_8_BIT, 2: PREFILL_16_BIT, 4: PREFILL_32_BIT}


def next_power_of_2(number: int) -> int:
    """Return the least power of two >= `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def choose_parts(head_blocks: int, num_slots: int) -> int:
    """Return the number of parts of a work list: as many as run at once, with one program per part and head block.

    num_slots: programs that the device holds at once.
    """
    return max(1, num_slots // head_blocks)


def least_blocks(config: TileConfig) -> int:
    """Return the least number of key blocks in a part of a work list."""
    return -(-LEAST_PART_TOKENS // config.block_n)


def number_size(query_size: int, cached_size: int) -> int:
    """Return the element size in bytes that selects a tile: 4 for float32 queries, else that of the cache."""
    return 4 if query_size == 4 else cached_size


def tile_config(head_dim: int, element_size: int, group: int, *, wide: bool) -> TileConfig:
    """Return the tile for heads of `head_dim`, with `group` query heads per key-value head.

    element_size: in bytes, see `number_size`. wide: for many queries per request instead of one or a few.
    Raises: ValueError if no kernel supports the head size.
    """
    padded = max(64, next_power_of_2(head_dim))
    table = (PREFILL if wide else DECODE)[element_size]
    if padded not in table:
        raise ValueError(f"no attention kernel for heads of {head_dim}: at most 256")
    config = table[padded]
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


def latent_config(num_heads: int, element_size: int, *, wide: bool) -> TileConfig:
    """Return the tile of absorbed latent attention with `num_heads` heads per latent of up to 512 elements.

    element_size: in bytes, see `number_size`. wide: for many queries per request instead of one.
    """
    return LATENT[element_size][64 if wide or num_heads > NARROW_ROWS else NARROW_ROWS]


def latent_tile_heads(num_heads: int, config: TileConfig) -> int:
    """Return the number of query heads in a tile of absorbed latent attention."""
    return min(next_power_of_2(num_heads), config.block_m)
