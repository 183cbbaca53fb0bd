"""How the attention kernel's launches are cut, from numbers known to the host.

A small table, looked up and never tuned at run time, so that no step stops to measure. This room must not know tensors.
"""

from typing import NamedTuple

# Shorter splits than this many tokens cost more to merge than they gain.
MIN_SPLIT_TOKENS = 256
# The same of decodes, which have no other way to spread over the device.
MIN_UNIT_TOKENS = 128
# Of decodes, how many times over the device is filled: the last units to run are then a small part of all.
UNIT_WAVES = 4
# Of those over latents, whose results are wide: of 16 heads a unit's are, written and read, the bytes of 57 tokens.
LATENT_UNIT_WAVES = 2
MAX_SPLITS = 64
# Without a device to ask (the interpreter) a launch is shaped as for a small one.
INTERPRETER_SMS = 8
# Query rows of a prompt's tile, here and in FlashAttention.
PROMPT_ROWS = 128


class TileConfig(NamedTuple):
    """How one launch is tiled: rows (positions x group) and tokens of a tile, warps, stages, and CTAs an SM holds."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int


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


def choose_splits(num_tiles: int, max_seq_len: int, num_slots: int) -> int:
    """Into how many splits each tile's keys are cut, so that the device is filled twice over, but for short contexts.

    num_tiles: tiles times key-value heads. num_slots: tiles that the device holds at once.
    """
    wanted = -(-2 * num_slots // num_tiles)
    return max(1, min(wanted, -(-max_seq_len // MIN_SPLIT_TOKENS), MAX_SPLITS))


def choose_units(num_kv_heads: int, num_slots: int, waves: int = UNIT_WAVES) -> int:
    """Into how many units of equal length a step's decodes are cut, each for every key-value head.

    num_slots: tiles that the device holds at once. waves: how many times over they are filled.
    """
    return max(1, waves * num_slots // num_kv_heads)


def number_size(query_size: int, cached_size: int) -> int:
    """The bytes of a number that decide a tiling, from those of queries and of cache: 4 where products are float32."""
    return 4 if query_size == 4 else cached_size


def tile_config(head_dim: int, element_size: int, group: int, max_query_len: int) -> TileConfig:
    """The tiling for heads of `head_dim` and numbers of `element_size` bytes, `group` query heads to a key-value head.

    element_size: see `number_size`.
    Raises ValueError for heads that no kernel is made for.
    """
    padded = max(64, next_power_of_2(head_dim))
    table = (DECODE if max_query_len == 1 else PREFILL)[element_size]
    if padded not in table:
        raise ValueError(f"no attention kernel for heads of {head_dim}: at most 256")
    config = table[padded]
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


def latent_config(num_heads: int, element_size: int) -> TileConfig:
    """The tiling of absorbed latent attention, with `num_heads` heads to each latent of up to 512 numbers.

    element_size: see `number_size`.
    """
    return LATENT[element_size][16 if num_heads <= 16 else 64]
