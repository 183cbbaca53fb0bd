"""Operators whose cost is their traffic: norms, rotary embedding with the cache write, SwiGLU.

This room must not know attention or models. On CUDA each is one Triton kernel behind a custom operator, so that
torch.compile traces through it; elsewhere it is the plain torch of `reference`.
"""

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import reference

__all__ = ["add_rms_norm", "rms_norm", "rope_and_cache", "silu_and_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019).

    x: [T, H] or [T, n, D], the last dimension contiguous, the others with any stride. weight: [H] or [D], of the dtype
    of `x`. Returns a contiguous tensor like `x`; computed in float32, rounded once.
    """
    if x.is_cuda:
        return _rms_norm_op(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream's step: `(rms_norm(x + residual), x + residual)`.

    x, residual: [T, H], rows contiguous. weight: [H]. The sum is rounded to the dtype of `x` before its norm is taken,
    so that both results describe the same numbers.
    """
    if x.is_cuda:
        return _add_rms_norm_op(x, residual, weight, eps)
    return reference.add_rms_norm(x, residual, weight, eps)


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
    """Rotate queries and keys by their positions, and write keys and values into the paged cache, in place.

    q: [T, Hq, D]; k, v: [T, Hkv, D]; heads contiguous ([.., D] with strides (D, 1)), tokens with any stride, so that
        they may be views into one [T, (Hq + 2 Hkv) D] projection.
    cos_sin: float32 [max_pos, rot], cosines in the first half of each row, sines in the second. The first rot <= D
        dimensions of each head are rotated, dimension i with i + rot / 2 (Su et al. 2021, in GPT-NeoX's order).
    positions: int64 [T]. slot_mapping: int64 [T], where in the cache each token goes, page * page_size + offset; no
        slot of a real token may occur twice.
    k_cache, v_cache: [N, P, Hkv, D], contiguous.
    Returns the rotated q, contiguous [T, Hq, D]. The rotation is computed in float32 and rounded once.
    """
    if q.is_cuda:
        return _rope_and_cache_op(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache)
    return reference.rope_and_cache(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU's gate (Shazeer 2020): `silu(x[:, :I]) * x[:, I:]` for contiguous x [T, 2 I]; returns [T, I]."""
    if x.is_cuda:
        return _silu_and_mul_op(x)
    return reference.silu_and_mul(x)


@torch.library.custom_op("nanovllm::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    from nanovllm_kernels.elementwise import triton_norm

    return triton_norm.rms_norm(x, weight, eps)


_rms_norm_op.register_fake(lambda x, *_: x.new_empty(x.shape))


@torch.library.custom_op("nanovllm::add_rms_norm", mutates_args=())
def _add_rms_norm_op(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from nanovllm_kernels.elementwise import triton_norm

    return triton_norm.add_rms_norm(x, residual, weight, eps)


_add_rms_norm_op.register_fake(lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape)))


@torch.library.custom_op("nanovllm::rope_and_cache", mutates_args=("k_cache", "v_cache"))
def _rope_and_cache_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    from nanovllm_kernels.elementwise import triton_rope

    return triton_rope.rope_and_cache(q, k, v, cos_sin, positions, slot_mapping, k_cache, v_cache)


_rope_and_cache_op.register_fake(lambda q, *_: q.new_empty(q.shape))


@torch.library.custom_op("nanovllm::silu_and_mul", mutates_args=())
def _silu_and_mul_op(x: Tensor) -> Tensor:
    from nanovllm_kernels.elementwise import triton_activation

    return triton_activation.silu_and_mul(x)


_silu_and_mul_op.register_fake(lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)))
