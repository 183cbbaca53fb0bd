"""The elementwise operators in plain torch: the oracle of the kernels, and the CPU path.

Written for few torch calls each: at one token a call costs more than its arithmetic.
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the package's `rms_norm`.

    torch has no fused RMSNorm for the CPU, but a fused LayerNorm, and of x beside -x the mean is zero and the variance
    the mean square of x: half the time of `functional.rms_norm`. Statistics are float32 and the result rounded once.
    """
    size = weight.shape[0]
    both = torch.cat((x, -x), -1)
    return functional.layer_norm(both, (2 * size,), torch.cat((weight, weight)), eps=eps)[..., :size]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See the package's `add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """See the package's `rope_and_cache`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, -1)
    if _follows(q, k):
        # Side by side in one projection, so they are one strided tensor: half the calls.
        heads = q.as_strided((num_tokens, num_q_heads + num_kv_heads, head_dim), q.stride())
        rotated_q, rotated_k = _rotate(heads, cos, sin).split((num_q_heads, num_kv_heads), 1)
    else:
        rotated_q, rotated_k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    k_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, rotated_k)
    v_cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, v)
    return rotated_q.contiguous()


def _follows(q: Tensor, k: Tensor) -> bool:
    """Whether each token's key heads lie right behind its query heads, in the same storage."""
    return (
        q.stride() == k.stride()
        and q.stride(1) == q.shape[2]
        and k.data_ptr() - q.data_ptr() == q.shape[1] * q.shape[2] * q.element_size()
        and k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of `x` [T, n, D] by `cos` and `sin`, each float32 [T, 1, rot / 2]. A new tensor."""
    half = cos.shape[-1]
    turned = x.to(torch.float32, copy=True)
    first, second = turned[..., :half], turned[..., half : 2 * half]
    first_by_sin = first * sin
    first.mul_(cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).add_(first_by_sin)
    return turned.to(x.dtype)


def silu_and_mul(x: Tensor) -> Tensor:
    """See the package's `silu_and_mul`. Here the SiLU is rounded to the dtype of `x` before the product."""
    gate, up = x.chunk(2, -1)
    return functional.silu(gate).mul_(up)
