"""Operators bound by memory traffic: norms, rotary embedding with the cache write, and gates.

Each operator is one Triton kernel on CUDA. Under torch.compile, `rms_norm` and the gates are plain torch, which the
compiler can fuse.
"""

import torch
from torch import Tensor

from nanovllm_kernels.elementwise import elementwise_reference
from nanovllm_kernels.elementwise.rotation import QKNorm, Rotation, RotationFactors
from nanovllm_kernels.platform import computes_rows_in_float32

__all__ = [
    "QKNorm",
    "Rotation",
    "compute_mean_squares",
    "latent_rope_and_cache",
    "norm_parts",
    "plan_rotation",
    "prepare_norm_weight",
    "rms_norm",
    "rope_and_cache",
    "sigmoid_and_mul",
    "silu_and_mul",
]


def prepare_norm_weight(weight: Tensor) -> Tensor:
    """Prepare `weight` [H] for `rms_norm`. Returns two concatenated float32 copies on a CPU, and `weight` on CUDA."""
    return weight if weight.is_cuda else elementwise_reference.prepare_norm_weight(weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang and Sennrich 2019).

    x: [T, H] or [T, n, D]. Only the last dimension must be contiguous.
    weight: [H] or [D], plain or from `prepare_norm_weight`.
    dtype: the result's dtype on CUDA. None: the weight's dtype. On a CPU the result has the dtype of `x`.
    """
    if torch.compiler.is_compiling():
        return elementwise_reference.rms_norm_formula(x, weight, eps, dtype)
    if x.is_cuda:
        return _rms_norm_op(x, weight, eps, dtype)
    return elementwise_reference.rms_norm(x, weight, eps)


def norm_parts(
    x: Tensor,
    sizes: tuple[int, int],
    weights: tuple[Tensor, Tensor],
    eps: float,
    mean_squares: Tensor | None = None,
) -> None:
    """Apply `rms_norm` in place to two parts of each row: the first `sizes[0]` elements, and the next `sizes[1]`.

    x: [T, W]. Only the last dimension must be contiguous.
    weights: [sizes[0]] and [sizes[1]], plain or from `prepare_norm_weight`.
    mean_squares: float32 [T, 2], mean squares of both parts over the elements of all ranks. None: `x` has all elements
        of both parts.
    """
    if x.is_cuda:
        _norm_parts_op(x, list(sizes), *weights, eps, mean_squares)
        return
    for index, (part, weight) in enumerate(zip(_split_parts(x, sizes), weights, strict=True)):
        if mean_squares is None:
            part.copy_(elementwise_reference.rms_norm(part, weight, eps))
        else:
            factors = torch.rsqrt(mean_squares[:, index : index + 1] + eps)
            part.copy_(part.float() * factors * weight[: part.shape[1]].float())


def compute_mean_squares(x: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return the mean squares of two parts of each row of `x` [T, W], float32 [T, 2]. sizes: see `norm_parts`."""
    if x.is_cuda:
        return _compute_mean_squares_op(x, list(sizes))
    return torch.stack([part.float().square().mean(-1) for part in _split_parts(x, sizes)], 1)


def _split_parts(x: Tensor, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    first_size, second_size = sizes
    return x.narrow(-1, 0, first_size), x.narrow(-1, first_size, second_size)


def plan_rotation(cos_sin: Tensor, positions: Tensor) -> Rotation:
    """Prepare the rotation of a step's tokens, once for all layers.

    cos_sin: float32 [max_pos, rot]. The first half of each row has cosines, the second half sines.
    positions: int64 [T].
    """
    factors = None if positions.is_cuda else elementwise_reference.gather_rotation(cos_sin, positions)
    return Rotation(cos_sin, positions, factors)


def rope_and_cache(
    qkv: Tensor,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    qk_norm: QKNorm | None = None,
    kv_scales: Tensor | None = None,
    *,
    writes_back_keys_values: bool = False,
) -> Tensor:
    """Rotate queries and keys by their positions, and write keys and values into the paged cache.

    On CUDA, infinite and NaN elements of value heads are cached as 0, because FlashAttention may read cached values
    past a request's end.

    qkv: [T, Hq + 2 Hkv, D], query, key and value heads. Heads are contiguous. Tokens may have any stride. Query heads
        are overwritten, and key heads may be overwritten.
    rotation: applies to the first rot <= D dimensions of each head. Dimensions i and i + rot / 2 form a pair (Su et al.
        2021, in GPT-NeoX's order).
    slot_mapping: int64 [T], each token's cache slot, page * page_size + offset. Unique except for padding.
    kv_cache: [N, P, 2 Hkv, D], contiguous: N pages of P slots. Key heads precede value heads in a slot. The dtype is
        e4m3 or that of `qkv`. On a CPU with float32 `qkv`, any dtype is supported.
    qk_norm: norms of query and key heads before the rotation. None: no norms.
    kv_scales: uint8 [N, 2 Hkv, P], contiguous. None: the cache is not FP8.
    writes_back_keys_values: whether to also write the cached keys and values back to `qkv`.
    Returns: rotated queries [T, Hq, D] in the cache's dtype, or in the dtype of `qkv` if the cache is FP8 or a CPU
        computes in float32. The result is a view of `qkv` if the dtypes are equal.
    Raises: ValueError if `writes_back_keys_values` is set on a CPU or for an FP8 cache.
    """
    if writes_back_keys_values and (not qkv.is_cuda or kv_scales is not None):
        raise ValueError("writes_back_keys_values needs a CUDA device and a cache that is not quantised")
    num_q_heads = qkv.shape[1] - kv_cache.shape[2]
    if not qkv.is_cuda and _has_cpu_kernel(qkv, kv_cache):
        _rope_and_cache_on_cpu(qkv, rotation.factors, slot_mapping, kv_cache, qk_norm)
    elif not qkv.is_cuda:
        qkv = elementwise_reference.rope_and_cache(qkv, rotation.factors, slot_mapping, kv_cache, kv_scales, qk_norm)
    else:
        norm = (None, None, 0.0) if qk_norm is None else qk_norm
        cache = (slot_mapping, kv_cache, kv_scales)
        _rope_and_cache_op(qkv, rotation.cos_sin, rotation.positions, *cache, *norm, writes_back_keys_values)
    return qkv.narrow(1, 0, num_q_heads)


def _has_cpu_kernel(qkv: Tensor, kv_cache: Tensor) -> bool:
    has_supported_dtypes = qkv.dtype == torch.float32 and kv_cache.dtype == torch.bfloat16
    return has_supported_dtypes and computes_rows_in_float32(qkv.shape[0]) and not torch.compiler.is_compiling()


def _rope_and_cache_on_cpu(
    qkv: Tensor, factors: RotationFactors, slot_mapping: Tensor, kv_cache: Tensor, qk_norm: QKNorm | None
) -> None:
    from nanovllm_kernels.elementwise import numba_rope

    if qk_norm is not None:
        qk_norm = QKNorm(qk_norm.q_weight.float(), qk_norm.k_weight.float(), qk_norm.eps)
    numba_rope.rope_and_cache(qkv, factors, slot_mapping, kv_cache, qk_norm)


def latent_rope_and_cache(
    q: Tensor,
    entries: Tensor,
    norm_weight: Tensor,
    eps: float,
    rotation: Rotation,
    slot_mapping: Tensor,
    kv_cache: Tensor,
    kv_scales: Tensor | None = None,
) -> None:
    """Rotate queries in place, and write normalized latents and rotated keys to the paged cache of latent attention.

    Source: DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.

    q: [T, H, D]. Heads are contiguous. Tokens may have any stride. The last R <= D dimensions of each head are rotated.
    entries: [T, L + R]. The last dimension is contiguous. A row is a latent [L] and the key [R] that all heads share.
    norm_weight: [L], plain or from `prepare_norm_weight`.
    rotation: rotates R dimensions. Dimensions i and i + R / 2 form a pair.
    slot_mapping: int64 [T], each token's cache slot, page * page_size + offset. Unique except for padding.
    kv_cache: [N, P, 1, L + R], contiguous: N pages of P slots. The dtype is e4m3 or that of `q`. On a CPU, any dtype
        is supported.
    kv_scales: uint8 [N, 1, P], one scale per token. None: the cache is not FP8.
    """
    if rotation.factors is not None:
        elementwise_reference.latent_rope_and_cache(
            q, entries, norm_weight, eps, rotation.factors, slot_mapping, kv_cache, kv_scales
        )
        return
    _latent_rope_and_cache_op(
        q, entries, norm_weight, eps, rotation.cos_sin, rotation.positions, slot_mapping, kv_cache, kv_scales
    )


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(x[:, :I]) * x[:, I:]` (SwiGLU, Shazeer 2020) for contiguous `x` [T, 2 I]."""
    if torch.compiler.is_compiling():
        return elementwise_reference.silu_and_mul_formula(x)
    if x.is_cuda:
        return _silu_and_mul_op(x)
    return elementwise_reference.silu_and_mul(x)


def sigmoid_and_mul(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x * sigmoid(gate)`. x: [T, W], contiguous. gate: [T, W]. Only the last dimension must be contiguous."""
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
def _norm_parts_op(
    x: Tensor,
    sizes: list[int],
    first_weight: Tensor,
    second_weight: Tensor,
    eps: float,
    mean_squares: Tensor | None = None,
) -> None:
    from nanovllm_kernels.elementwise import triton_norm

    triton_norm.norm_parts(x, sizes, first_weight, second_weight, eps, mean_squares)


@torch.library.custom_op("nanovllm::compute_mean_squares", mutates_args=())
def _compute_mean_squares_op(x: Tensor, sizes: list[int]) -> Tensor:
    from nanovllm_kernels.elementwise import triton_norm

    return triton_norm.compute_mean_squares(x, sizes)


_compute_mean_squares_op.register_fake(lambda x, _sizes: x.new_empty((x.shape[0], 2), dtype=torch.float32))


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
    writes_back_keys_values: bool,
) -> None:
    from nanovllm_kernels.elementwise import triton_rope

    qk_norm = None if q_weight is None or k_weight is None else QKNorm(q_weight, k_weight, eps)
    rotation = Rotation(cos_sin, positions, None)
    triton_rope.rope_and_cache(
        qkv, rotation, slot_mapping, kv_cache, kv_scales, qk_norm, writes_back_keys_values=writes_back_keys_values
    )


@torch.library.custom_op("nanovllm::latent_rope_and_cache", mutates_args=("q", "kv_cache", "kv_scales"))
def _latent_rope_and_cache_op(
    q: Tensor,
    entries: Tensor,
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
    triton_latent.rope_and_cache(q, entries, norm_weight, eps, rotation, slot_mapping, kv_cache, kv_scales)


@torch.library.custom_op("nanovllm::silu_and_mul", mutates_args=())
def _silu_and_mul_op(x: Tensor) -> Tensor:
    from nanovllm_kernels.elementwise import triton_activation

    return triton_activation.silu_and_mul(x)


_silu_and_mul_op.register_fake(lambda x: x.new_empty((x.shape[0], x.shape[1] // 2)))
