"""Operators bound by memory traffic: norms, rotary embedding with the cache write, and gates.

On CUDA each is one Triton kernel in a custom operator; elsewhere `reference` computes it in plain torch. torch.compile
sees the formulas of norms and gates, which it fuses, and the operators for the rotations.
"""

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import reference
from nanovllm_kernels.elementwise.rotation import QKNorm, Rotation, RotationFactors
from nanovllm_kernels.platform import runs_in_float32

__all__ = [
    "QKNorm",
    "Rotation",
    "latent_rope_and_cache",
    "norm_parts",
    "pack_norm",
    "plan_rotation",
    "rms_norm",
    "rope_and_cache",
    "sigmoid_and_mul",
    "silu_and_mul",
]


def pack_norm(weight: Tensor) -> Tensor:
    """Prepare a norm's `weight` [H] for `rms_norm`: float32 and repeated twice on a CPU, unchanged on CUDA."""
    return weight if weight.is_cuda else reference.pack_norm(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019).

    x: [T, H] or [T, n, D], the last dimension contiguous, other dimensions with any stride.
    weight: [H] or [D], plain or from `pack_norm`.
    dtype: of the result on CUDA; None: the weight's dtype. On a CPU the result has x's dtype.
    Returns: shape of `x`, the last dimension contiguous. Computed in float32, rounded once.
    """
    if torch.compiler.is_compiling():
        return reference.rms_norm_formula(x, weight, eps, dtype)
    if x.is_cuda:
        return _rms_norm_op(x, weight, eps, dtype)
    return reference.rms_norm(x, weight, eps)


def norm_parts(x: Tensor, sizes: tuple[int, int], weights: tuple[Tensor, Tensor], eps: float) -> None:
    """Apply `rms_norm` in place to the first `sizes[0]` elements of each row, and separately to the next `sizes[1]`.

    x: [T, W], rows contiguous, with any stride.
    weights: one per part, of the part's size, plain or from `pack_norm`.
    """
    if x.is_cuda:
        _norm_parts_op(x, list(sizes), *weights, eps)
        return
    for part, weight in zip(x.split_with_sizes([*sizes, x.shape[1] - sum(sizes)], -1), weights, strict=False):
        part.copy_(reference.rms_norm(part, weight, eps))


def plan_rotation(cos_sin: Tensor, positions: Tensor) -> Rotation:
    """Prepare the rotation of a step's tokens once for all layers.

    cos_sin: float32 [max_pos, rot], cosines in the first half of each row, sines in the second half.
    positions: int64 [T].
    """
    factors = None if positions.is_cuda else reference.gather_rotation(cos_sin, positions)
    return Rotation(cos_sin, positions, factors)


def rope_and_cache(
    qkv: Tensor,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    qk_norm: QKNorm | None = None,
    kv_scales: Tensor | None = None,
    *,
    keep_keys: bool = False,
) -> Tensor:
    """Rotate queries and keys by their positions, and write keys and values into the paged cache, all in place.

    qkv: [T, Hq + 2 Hkv, D], each token's query heads, key heads, value heads; heads contiguous, tokens with any stride.
        The rotated queries overwrite the query heads; the key heads may be overwritten too.
    rotation: of rot <= D dimensions: the first rot of each head are rotated, dimension i with i + rot / 2 (Su et al.
        2021, in GPT-NeoX's order).
    slot_mapping: int64 [T], each token's cache slot, page * page_size + offset; slots of real tokens are unique.
    kv_cache: [N, P, 2 Hkv, D], contiguous: in each slot the key heads, then the value heads. Of qkv's dtype (on a CPU
        any, with float32 `qkv`), or float8_e4m3fn, to which `fp8.quantize` rounds.
    qk_norm: norms of query and key heads before the rotation, or None.
    kv_scales: uint8 [N, 2 Hkv, P], contiguous, of a quantised cache, else None.
    keep_keys: also store the keys and values in `qkv` as they are cached. Only on CUDA, and not for a quantised cache.
    Returns: rotated queries [T, Hq, D] in the cache's dtype; in qkv's own dtype for an FP8 cache and where a CPU
        computes in float32. A view of `qkv` if the dtype is the same.
    Raises: ValueError if `keep_keys` is not supported.

    Computed in float32 and rounded once; a CPU also rounds after the norm, unless `qkv` is float32. On CUDA the cache
    gets 0 for non-finite elements of value heads, so that these cannot reach the page's next request.
    """
    if keep_keys and (not qkv.is_cuda or kv_scales is not None):
        raise ValueError("keep_keys needs a CUDA device and a cache that is not quantised")
    num_q_heads = qkv.shape[1] - kv_cache.shape[2]
    if not qkv.is_cuda and _has_cpu_kernel(qkv, kv_cache):
        _rope_and_cache_on_cpu(qkv, rotation.factors, slot_mapping, kv_cache, qk_norm)
    elif not qkv.is_cuda:
        qkv = reference.rope_and_cache(qkv, rotation.factors, slot_mapping, kv_cache, kv_scales, qk_norm)
    else:
        norm = (None, None, 0.0) if qk_norm is None else qk_norm
        cache = (slot_mapping, kv_cache, kv_scales)
        _rope_and_cache_op(qkv, rotation.cos_sin, rotation.positions, *cache, *norm, keep_keys)
    return qkv.narrow(1, 0, num_q_heads)


def _has_cpu_kernel(qkv: Tensor, kv_cache: Tensor) -> bool:
    has_supported_dtypes = qkv.dtype == torch.float32 and kv_cache.dtype == torch.bfloat16
    return has_supported_dtypes and runs_in_float32(qkv.shape[0]) and not torch.compiler.is_compiling()


def _rope_and_cache_on_cpu(
    qkv: Tensor, factors: RotationFactors, slot_mapping: Tensor, kv_cache: Tensor, qk_norm: QKNorm | None
) -> None:
    from nanovllm_kernels.elementwise import numba_rope

    norm = None
    if qk_norm is not None:
        norm = QKNorm(qk_norm.q_weight.float(), qk_norm.k_weight.float(), qk_norm.eps)
    numba_rope.rope_and_cache(qkv, factors, slot_mapping, kv_cache, norm)


def latent_rope_and_cache(
    q: Tensor,
    latents: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Prepare latent attention (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434): rotate the end of each query head
    in place, norm each latent, rotate the key part beside it, and write both to the paged cache.

    q: [T, H, D], heads contiguous, tokens with any stride; the last R <= D dimensions of each head are rotated.
    latents: [T, L + R], the last dimension contiguous: a latent, then the key part that all heads share.
    norm_weight: [L], plain or from `pack_norm`. eps: of the norm.
    rotation: of R dimensions, in GPT-NeoX's order. slot_mapping: as for `rope_and_cache`.
    kv_cache: [N, P, 1, L + R], contiguous, of q's dtype (on a CPU any), or float8_e4m3fn: a token's latent and key part
        then share one scale. kv_scales: uint8 [N, 1, P] for an FP8 cache, else None.
    Computed in float32 and rounded once; a CPU also rounds after the norm, unless `latents` is float32.
    """
    if rotation.factors is not None:
        reference.latent_rope_and_cache(
            q, latents, norm_weight, eps, rotation.factors, slot_mapping, kv_cache, kv_scales
        )
        return
    _latent_rope_and_cache_op(
        q, latents, norm_weight, eps, rotation.cos_sin, rotation.positions, slot_mapping, kv_cache, kv_scales
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """Return SwiGLU's gate (Shazeer 2020), `silu(x[:, :I]) * x[:, I:]`, [T, I], for contiguous x [T, 2 I]."""
    if torch.compiler.is_compiling():
        return reference.silu_and_mul_formula(x)
    if x.is_cuda:
        return _silu_and_mul_op(x)
    return reference.silu_and_mul(x)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)` for contiguous x [T, W] and `gate` [T, W] with contiguous rows of any stride."""
    if torch.compiler.is_compiling() or not x.is_cuda:
        return (x.float() * gate.float().sigmoid()).to(x.dtype)
    return _sigmoid_and_mul_op(x, gate)


@torch.library.custom_op("nanovllm::sigmoid_and_mul", mutates_args=())
def _sigmoid_and_mul_op(x: Tensor, gate: Tensor) -> Tensor:
    from nanovllm_kernels.elementwise import triton_activation

    return triton_activation.sigmoid_and_mul(x, gate)


_sigmoid_and_mul_op.register_fake(lambda x, _gate: torch.empty_like(x))


@torch.library.custom_op("nanovllm::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    from nanovllm_kernels.elementwise import triton_norm

    return triton_norm.rms_norm(x, weight, eps, dtype or weight.dtype)


_rms_norm_op.register_fake(
    lambda x, weight, _eps, dtype=None: x.new_empty(x.shape, dtype=weight.dtype if dtype is None else dtype)
)


@torch.library.custom_op("nanovllm::norm_parts", mutates_args=("x",))
def _norm_parts_op(x: Tensor, sizes: list[int], first: Tensor, second: Tensor, eps: float) -> None:
    from nanovllm_kernels.elementwise import triton_norm

    triton_norm.norm_parts(x, sizes, first, second, eps)


@torch.library.custom_op("nanovllm::rope_and_cache", mutates_args=("qkv", "kv_cache", "kv_scales"))
def _rope_and_cache_op(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    keep_keys: bool,
) -> None:
    from nanovllm_kernels.elementwise import triton_rope

    qk_norm = None if q_weight is None or k_weight is None else QKNorm(q_weight, k_weight, eps)
    rotation = Rotation(cos_sin, positions, None)
    triton_rope.rope_and_cache(qkv, rotation, slot_mapping, kv_cache, kv_scales, qk_norm, keep_keys=keep_keys)


@torch.library.custom_op("nanovllm::latent_rope_and_cache", mutates_args=("q", "kv_cache", "kv_scales"))
def _latent_rope_and_cache_op(
    q: Tensor,
    latents: Tensor,
    norm_weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None,
) -> None:
    from nanovllm_kernels.elementwise import triton_latent

    rotation = Rotation(cos_sin, positions, None)
    triton_latent.rope_and_cache(q, latents, norm_weight, eps, rotation, slot_mapping, kv_cache, kv_scales)


@torch.library.custom_op("nanovllm::silu_and_mul", mutates_args=())
def _silu_and_mul_op(x: Tensor) -> Tensor:
    from nanovllm_kernels.elementwise import triton_activation

    return triton_activation.silu_and_mul(x)


_silu_and_mul_op.register_fake(lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)))
