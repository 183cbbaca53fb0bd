"""Computes random bits from (seed, position, token id), equal on all devices.

Each token id is hashed with two 32-bit keys per row, as in the integer mixers by Wang and Appleby.
"""

import torch
from torch import Tensor

SEED_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
POSITION_MULTIPLIER = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
# Without this number, seed 0, position 0 and token 0 would hash to 0.
KEY_OFFSET = 2611923443488327891  # 0x243F6A8885A308D3
MIX_MULTIPLIER = -4658895280553007687  # 0xBF58476D1CE4E5B9
TOKEN_MULTIPLIER = -1640531535  # 0x9E3779B1 as int32
INNER_HASH_MULTIPLIER = 569420461  # 0x21F0AAAD
FINAL_HASH_MULTIPLIER = -749064809  # 0xD35A2D97

# Clears the sign and bit 7. If bit 7 could be set, float32 would round the largest integers up to 2^31. Exponential
# draws from 2^31 would be infinite.
UNIFORM_MASK = 0x7FFFFF7F
# A uniform number is masked bits * UNIFORM_SCALE + UNIFORM_OFFSET.
UNIFORM_SCALE = 2.0**-31
UNIFORM_OFFSET = 2.0**-32


def derive_row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Derive two int32 keys [B] from int64 seeds [B] and int32 or int64 positions [B]."""
    mixed = (seeds * SEED_MULTIPLIER).add_(positions.long() * POSITION_MULTIPLIER).add_(KEY_OFFSET)
    mixed ^= mixed >> 32
    mixed *= MIX_MULTIPLIER
    mixed ^= mixed >> 29
    return (mixed >> 32).to(torch.int32), mixed.to(torch.int32)


def hash_tokens(token_ids: Tensor, first_key: Tensor, second_key: Tensor) -> Tensor:
    """Hash `token_ids`, int32 [n], to random bits: int32 [n] for scalar int32 keys, or [B, n] for keys [B, 1]."""
    bits = (token_ids * TOKEN_MULTIPLIER) ^ first_key
    bits ^= (bits >> 16) & 0xFFFF
    bits *= INNER_HASH_MULTIPLIER
    bits ^= (bits >> 15) & 0x1FFFF
    bits += second_key
    bits *= FINAL_HASH_MULTIPLIER
    return bits


def draw_negative_exponentials(bits: Tensor) -> Tensor:
    """Convert `bits` to -x, where x is a float32 draw from Exp(1). The results are finite and below 0."""
    uniform_integers = (bits & UNIFORM_MASK).to(torch.float32)
    return torch.rsub(uniform_integers, -UNIFORM_OFFSET, alpha=UNIFORM_SCALE).log1p_()
