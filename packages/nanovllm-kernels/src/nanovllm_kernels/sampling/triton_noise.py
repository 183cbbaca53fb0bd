"""Computes noisy logits on CUDA: logits / temperature, plus Gumbel noise. `noise` defines the random bits."""

import math

import triton
import triton.language as tl
from triton.language.extra import libdevice

from nanovllm_kernels.sampling import noise

SEED_MULTIPLIER = tl.constexpr(noise.SEED_MULTIPLIER)
POSITION_MULTIPLIER = tl.constexpr(noise.POSITION_MULTIPLIER)
KEY_OFFSET = tl.constexpr(noise.KEY_OFFSET)
MIX_MULTIPLIER = tl.constexpr(noise.MIX_MULTIPLIER)
TOKEN_MULTIPLIER = tl.constexpr(noise.TOKEN_MULTIPLIER)
INNER_HASH_MULTIPLIER = tl.constexpr(noise.INNER_HASH_MULTIPLIER)
FINAL_HASH_MULTIPLIER = tl.constexpr(noise.FINAL_HASH_MULTIPLIER)
UNIFORM_MASK = tl.constexpr(noise.UNIFORM_MASK)
UNIFORM_SCALE = tl.constexpr(noise.UNIFORM_SCALE)
UNIFORM_OFFSET = tl.constexpr(noise.UNIFORM_OFFSET)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# Triton's interpreter has no libdevice.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    """Return log2(x) by one hardware instruction. On a GPU, tl.log2 evaluates a polynomial instead."""
    return tl.log2(x) if IS_INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def load_logits(logits_ptr, tokens, mask):
    """Load logits as float32. NaN logits and masked tokens give -inf."""
    logits = tl.load(logits_ptr + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def add_gumbel_noise(logits, tokens, scale, seed, position):
    """Return `logits * scale` plus Gumbel noise in base 2. scale: log2(e) / temperature."""
    # Base 2 saves time: only log2 is a single instruction.
    mixed = seed * SEED_MULTIPLIER + position.to(tl.int64) * POSITION_MULTIPLIER + KEY_OFFSET
    mixed ^= mixed >> 32
    mixed *= MIX_MULTIPLIER
    mixed ^= mixed >> 29
    bits = (tokens * TOKEN_MULTIPLIER) ^ (mixed >> 32).to(tl.int32)
    bits ^= (bits >> 16) & 0xFFFF
    bits *= INNER_HASH_MULTIPLIER
    bits ^= (bits >> 15) & 0x1FFFF
    # Equals (bits + mixed) * FINAL_HASH_MULTIPLIER, but the product of `mixed` is computed once per row.
    bits = bits * FINAL_HASH_MULTIPLIER + mixed.to(tl.int32) * FINAL_HASH_MULTIPLIER
    uniform = (bits & UNIFORM_MASK).to(tl.float32) * UNIFORM_SCALE + UNIFORM_OFFSET
    # Computes -log(1 - uniform). For small `uniform`, 1 - uniform would lose digits, so a series is used instead.
    series = uniform * (1 + uniform * (1 / 2 + uniform * (1 / 3 + uniform * (1 / 4 + uniform * (1 / 5)))))
    exponential = tl.where(uniform < 0.0625, series, -LN_2 * _log2(1 - uniform))
    return logits * scale - _log2(exponential)
