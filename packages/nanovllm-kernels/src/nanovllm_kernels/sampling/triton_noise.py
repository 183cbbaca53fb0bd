"""What every token of a draw on CUDA is worth: its logit over the temperature, and `noise`'s random number with it.

This room must not know filters: it scores whatever tokens it is handed, and gives a token the same score wherever it
is asked for.
"""

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
FIRST_MULTIPLIER = tl.constexpr(noise.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(noise.SECOND_MULTIPLIER)
UNIFORM_MASK = tl.constexpr(noise.UNIFORM_MASK)
UNIFORM_SCALE = tl.constexpr(noise.UNIFORM_SCALE)
UNIFORM_OFFSET = tl.constexpr(noise.UNIFORM_OFFSET)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))

# Triton's interpreter has no libdevice.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _log2(x):
    """Base 2 logarithm by the hardware's own instruction: tl.log2 is a polynomial of twelve terms and more."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def load_logits(logits_ptr, tokens, mask):
    """Logits in float32; -inf outside of the mask and for a NaN."""
    logits = tl.load(logits_ptr + tokens, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.where(logits == logits, logits, float("-inf"))


@triton.jit
def scores(logits, tokens, scale, seed, position):
    """Logits with Gumbel noise, in units of log 2: the greatest is the draw. `scale` is log2(e) / temperature.

    The integer steps of `noise`, then logarithms to base 2, which the hardware has: this runs for every token of the
    vocabulary, so that instructions are what it costs.
    """
    mixed = seed * SEED_MULTIPLIER + position.to(tl.int64) * POSITION_MULTIPLIER + KEY_OFFSET
    mixed ^= mixed >> 32
    mixed *= MIX_MULTIPLIER
    mixed ^= mixed >> 29
    bits = (tokens * TOKEN_MULTIPLIER) ^ (mixed >> 32).to(tl.int32)
    bits ^= (bits >> 16) & 0xFFFF
    bits *= FIRST_MULTIPLIER
    bits ^= (bits >> 15) & 0x1FFFF
    # (bits + key) * multiplier, but with one instruction a token.
    bits = bits * SECOND_MULTIPLIER + mixed.to(tl.int32) * SECOND_MULTIPLIER
    u = (bits & UNIFORM_MASK).to(tl.float32) * UNIFORM_SCALE + UNIFORM_OFFSET
    # -log1p(-u): its series where 1 - u would lose the digits of a small u, to one part in 5 million.
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5)))))
    exponential = tl.where(u < 0.0625, series, -LN_2 * _log2(1 - u))
    return logits * scale - _log2(exponential)
