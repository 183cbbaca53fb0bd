"""The sampler's random numbers: a stateless function of (seed, position, token id), with equal bits on all devices.

Two 32-bit keys are derived from (seed, position), and each token id is hashed under them by multiply and xor-shift
(after Wang's and Appleby's integer mixers). Hashing is integer arithmetic, so that torch and Triton agree bit for bit.
"""

import torch
from torch import Tensor

SEED_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
POSITION_MULTIPLIER = -4417276706812531889  # 0xC2B2AE3D27D4EB4F
# Without an offset, seed 0, position 0 and token 0 would hash to 0.
KEY_OFFSET = 2611923443488327891  # 0x243F6A8885A308D3
MIX_MULTIPLIER = -4658895280553007687  # 0xBF58476D1CE4E5B9
TOKEN_MULTIPLIER = -1640531535  # 0x9E3779B1 as int32
FIRST_MULTIPLIER = 569420461  # 0x21F0AAAD
SECOND_MULTIPLIER = -749064809  # 0xD35A2D97

# Clears the sign, bit 31, and bit 7: then the largest value is 2^31 - 129, which float32 does not round up to 2^31, and
# the uniform number stays below 1.
UNIFORM_MASK = 0x7FFFFF7F
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
    """Return 32 random bits, int32, for int32 `token_ids` [n] under keys of shape [] or [B, 1]."""
    bits = (token_ids * TOKEN_MULTIPLIER) ^ first_key
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST_MULTIPLIER
    bits ^= (bits >> 15) & 0x1FFFF
    bits += second_key
    bits *= SECOND_MULTIPLIER
    return bits


def draw_negative_exponentials(bits: Tensor) -> Tensor:
    """Return minus a float32 exponential draw for each of `bits`; never zero and always finite."""
    uniform = (bits & UNIFORM_MASK).to(torch.float32)
    return torch.rsub(uniform, -UNIFORM_OFFSET, alpha=UNIFORM_SCALE).log1p_()
