"""Device functions for the gates of Gated DeltaNet."""

import triton
import triton.language as tl

from nanovllm_kernels.linear_attention.layer_inputs import L2_NORM_EPS

L2_EPS = tl.constexpr(L2_NORM_EPS)  # added to a squared length, to avoid a division by 0
# For x above this limit, log(1 + exp(x)) is x in float32.
LINEAR_SOFTPLUS = tl.constexpr(20.0)


@triton.jit
def log_decay(a, decay_rate, dt_bias):
    """Return the logarithm of a state's decay for gate input `a`: -decay_rate * softplus(a + dt_bias)."""
    x = a + dt_bias
    return -decay_rate * tl.where(x > LINEAR_SOFTPLUS, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * tl.sigmoid(x)
