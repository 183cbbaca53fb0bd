"""How the attention kernel's launches are cut, from numbers known to the host.

A small table, looked up and never tuned at run time, so that no step stops to measure. This room must not know tensors.
"""

from typing import NamedTuple

# Shorter parts of a work list cost more to merge than they gain.
LEAST_PART_TOKENS = 128
# Tiles of at most so many rows are narrow: the fewest that tensor cores multiply without wgmma.
NARROW_ROWS = 16
# Without a device to ask (the interpreter) a launch is shaped as for a small one.
INTERPRETER_SMS = 8


# The registers of an SM of every architecture from Ampere to Hopper.
SM_REGISTERS = 65536


class TileConfig(NamedTuple):
    """How one launch is tiled: rows (positions x group) and tokens of a tile, warps, stages, and CTAs an SM holds."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int

    @property
    def max_registers(self) -> int:
        """Registers of a thread with which an SM holds `ctas_per_sm`, as the parts of a work list need."""
        return min(255, SM_REGISTERS // (32 * self.num_warps * self.ctas_per_sm) // 8 * 8)


# Keyed by padded head size. Two of the stages hide the look-up of pages; with five, two blocks of keys and of values
# are on their way at once, in 72 KiB of shared memory.
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
# Numbers of one byte, which are multiplied as float16.
DECODE_8_BIT = {
    64: TileConfig(16, 128, 4, 5, 3),
    128: TileConfig(16, 128, 4, 4, 3),
    256: TileConfig(16, 64, 4, 4, 3),
}
PREFILL_8_BIT = {
    # Of 64 or 128 tokens a tile Triton 3.6 makes kernels that fault or give wrong results, with any warps and stages.
    64: TileConfig(128, 32, 4, 3, 2),
    128: TileConfig(128, 64, 8, 3, 1),
    256: TileConfig(64, 32, 4, 2, 1),
}
# Full float32 products run on the plain cores: small tiles, for parity and not for speed.
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

# Of latents, which are keys and values at once: for few heads a rank (16), and for many (64 a tile). Chosen by what the
# compiler says of Hopper's registers and shared memory, not timed: with 16-bit numbers none spills in decodes.
LATENT_16_BIT = {16: TileConfig(16, 32, 4, 5, 2), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_8_BIT = {16: TileConfig(16, 64, 8, 5, 1), 64: TileConfig(64, 64, 8, 3, 1)}
LATENT_32_BIT = {16: TileConfig(16, 16, 4, 2, 1), 64: TileConfig(16, 16, 4, 2, 1)}
LATENT = {1: LATENT_8_BIT, 2: LATENT_16_BIT, 4: LATENT_32_BIT}
# Of prompts that are whole in a step, whose keys are of 192 numbers and whose values are of 128.
PLAIN_LATENT = {2: TileConfig(128, 64, 8, 3, 1), 4: TileConfig(32, 16, 4, 2, 1)}


class ProductTile(NamedTuple):
    """How a product is tiled: rows, columns and depth of a tile, warps, tiles on their way at once."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


# Of what brings queries to the latents and results back, by the bytes of a number. One H200, bf16, 128 heads, us of
# both products: 1,025 of 8,192 tokens, 175 of 1,000 and 68 of 256, and 25 where none is counted; cuBLAS, which can't
# count, takes 740, 111 and 45. So it has the steps of few tokens.
LEAST_COUNTED_TOKENS = 1024
HEADS_TILE = {2: ProductTile(128, 128, 128, 8, 3), 4: ProductTile(32, 32, 32, 4, 2)}
# So many programs take one tile of tokens after another.
HEADS_PROGRAMS = 528

DECODE = {1: DECODE_8_BIT, 2: DECODE_16_BIT, 4: DECODE_32_BIT}
PREFILL = {1: PREFILL_8_BIT, 2: PREFILL_16_BIT, 4: PREFILL_32_BIT}


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def choose_parts(head_blocks: int, num_slots: int) -> int:
    """Into how many parts a work list is cut: as many as the device holds at once, each for every block of heads.

    num_slots: programs that the device holds at once.
    """
    return max(1, num_slots // head_blocks)


def least_blocks(config: TileConfig) -> int:
    """The fewest blocks of keys in a part of a work list."""
    return -(-LEAST_PART_TOKENS // config.block_n)


def number_size(query_size: int, cached_size: int) -> int:
    """The bytes of a number that decide a tiling, from those of queries and of cache: 4 where products are float32."""
    return 4 if query_size == 4 else cached_size


def tile_config(head_dim: int, element_size: int, group: int, *, wide: bool) -> TileConfig:
    """The tiling for heads of `head_dim` and numbers of `element_size` bytes, `group` query heads to a key-value head.

    element_size: see `number_size`. wide: for many queries of a request rather than for one or a few.
    Raises ValueError for heads that no kernel is made for.
    """
    padded = max(64, next_power_of_2(head_dim))
    table = (PREFILL if wide else DECODE)[element_size]
    if padded not in table:
        raise ValueError(f"no attention kernel for heads of {head_dim}: at most 256")
    config = table[padded]
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


def latent_config(num_heads: int, element_size: int, *, wide: bool) -> TileConfig:
    """The tiling of absorbed latent attention, with `num_heads` heads to each latent of up to 512 numbers.

    element_size: see `number_size`. wide: for many queries of a request rather than for one.
    """
    return LATENT[element_size][64 if wide or num_heads > NARROW_ROWS else NARROW_ROWS]


def latent_tile_heads(num_heads: int, config: TileConfig) -> int:
    """The query heads of a tile of absorbed latent attention."""
    return min(next_power_of_2(num_heads), config.block_m)
