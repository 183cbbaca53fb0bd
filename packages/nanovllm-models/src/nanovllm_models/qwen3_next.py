"""Qwen3-Next (https://qwenlm.github.io/blog/qwen3_next/): Gated DeltaNet in most layers, gated attention in the others.

A head for multi-token prediction is loaded if the checkpoint has one, but nothing runs it yet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from nanovllm_core.layers.attention import HeadLayout, QKNorm, attend
from nanovllm_core.layers.compilation import MIN_COMPILED_ROWS, compile_for_rows
from nanovllm_core.layers.embedding import LMHead, VocabEmbedding
from nanovllm_core.layers.gated_attention import GatedQKVLinear
from nanovllm_core.layers.gated_delta_net import DeltaShape, GatedDeltaNet
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.moe import (
    STANDARD_NAMES,
    Experts,
    Router,
    Routing,
    SharedExpert,
    TokenGate,
    can_fuse_shared_expert,
)
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8, find_quantization
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding, Rotation
from nanovllm_core.model import BuildContext, CacheSpec, ForwardContext, ModelSpec
from nanovllm_kernels.elementwise import sigmoid_and_mul
from nanovllm_kernels.gemm.block_fp8 import GROUP
from nanovllm_models.checkpoint import WeightSource
from nanovllm_models.config_file import parse_quantization, parse_rotary
from nanovllm_models.fields import Fields
from nanovllm_models.llama import is_redundant
from nanovllm_models.model_spec import make_model_spec

LAYER_TYPES = ("linear_attention", "full_attention")
MTP = "mtp."
SHARED = SharedExpert("shared_expert", "shared_expert_gate")


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The fields of config.json that define the experts.

    sparse_layers: indices of the layers with experts; the other layers are dense.
    """

    num_experts: int
    intermediate_size: int
    shared_intermediate_size: int
    routing: Routing
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Qwen3NextConfig:
    """The fields of config.json that define the model.

    full_layers: indices of the layers with attention; the other layers are recurrent.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    full_layers: frozenset[int]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rotary: RotaryConfig
    attention_bias: bool
    delta: DeltaShape
    moe: MoEConfig
    tie_word_embeddings: bool
    quantization: BlockFP8 | None


def parse_config(config: Fields) -> Qwen3NextConfig:
    """Parse config.json; a missing field gets the value that transformers gives it.

    Raises ModelError for a field that is wrong or needs a feature that is not implemented.
    """
    if config.text("hidden_act", "silu") != "silu":
        raise config.error("hidden_act", "silu")
    num_heads = config.integer("num_attention_heads", 16)
    num_kv_heads = config.integer("num_key_value_heads", 2)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    num_layers = config.integer("num_hidden_layers", 48)
    head_dim = config.integer("head_dim", 256)
    quantization = parse_quantization(config)
    if quantization is not None and head_dim % GROUP:
        raise config.error("head_dim", f"a multiple of {GROUP}, so that gates and queries have separate FP8 blocks")
    max_position = config.integer("max_position_embeddings", 32768)
    eps = config.number("rms_norm_eps", 1e-6)
    return Qwen3NextConfig(
        vocab_size=config.integer("vocab_size", 151936),
        hidden_size=config.integer("hidden_size", 2048),
        intermediate_size=config.integer("intermediate_size", 5632),
        num_hidden_layers=num_layers,
        full_layers=_parse_full_layers(config, num_layers),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rms_norm_eps=eps,
        rotary=parse_rotary(config, max_position, partial_of=head_dim, default_fraction=0.25),
        attention_bias=config.flag("attention_bias", False),
        delta=_parse_delta(config, eps),
        moe=_parse_moe(config, num_layers),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        quantization=quantization,
    )


def _parse_full_layers(config: Fields, num_layers: int) -> frozenset[int]:
    kinds = config.texts("layer_types")
    if not kinds:
        interval = config.integer("full_attention_interval", 4)
        full = frozenset(index for index in range(num_layers) if (index + 1) % interval == 0)
        if not full:
            raise config.error("full_attention_interval", f"at most num_hidden_layers, {num_layers}")
        return full
    if len(kinds) != num_layers or not set(kinds) <= set(LAYER_TYPES) or LAYER_TYPES[1] not in kinds:
        raise config.error(
            "layer_types", f"{' or '.join(LAYER_TYPES)} for each of {num_layers} layers, {LAYER_TYPES[1]} at least once"
        )
    return frozenset(index for index, kind in enumerate(kinds) if kind == LAYER_TYPES[1])


def _parse_delta(config: Fields, eps: float) -> DeltaShape:
    num_k_heads = config.integer("linear_num_key_heads", 16)
    num_v_heads = config.integer("linear_num_value_heads", 32)
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads, {num_k_heads}")
    return DeltaShape(
        num_k_heads=num_k_heads,
        num_v_heads=num_v_heads,
        k_dim=config.integer("linear_key_head_dim", 128),
        v_dim=config.integer("linear_value_head_dim", 128),
        width=config.integer("linear_conv_kernel_dim", 4),
        eps=eps,
    )


def _parse_moe(config: Fields, num_layers: int) -> MoEConfig:
    # Published checkpoints have num_experts; transformers 5 may write num_local_experts.
    num_experts = config.integer("num_experts" if config.has("num_experts") else "num_local_experts", 512)
    top_k = config.integer("num_experts_per_tok", 10)
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"at most num_experts, {num_experts}")
    step, dense = config.integer("decoder_sparse_step", 1), config.indices("mlp_only_layers")
    return MoEConfig(
        num_experts=num_experts,
        intermediate_size=config.integer("moe_intermediate_size", 512),
        shared_intermediate_size=config.integer("shared_expert_intermediate_size", 512),
        routing=Routing(top_k, renormalize=config.flag("norm_topk_prob", True)),
        sparse_layers=frozenset(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense),
    )


class GatedAttention(nn.Module):
    """Grouped-query attention with normed, partly rotated heads and a gate for each number of its result.

    index: number of this module's cache among the context's paged caches.
    name: name of this module in the checkpoint.
    """

    def __init__(self, config: Qwen3NextConfig, index: int, build: BuildContext, name: str):
        super().__init__()
        joint = find_quantization(config.quantization, name, "q_proj", "k_proj", "v_proj")
        output = find_quantization(config.quantization, name, "o_proj")
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden_size, bias = config.hidden_size, config.attention_bias
        self.heads = HeadLayout.for_rank(num_heads, num_kv_heads, head_dim, build.parallel)
        self.qkv_proj = GatedQKVLinear(
            hidden_size, num_heads, num_kv_heads, head_dim, build, bias=bias, quantization=joint
        )
        self.o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, build, bias=bias, quantization=output)
        self.q_norm, self.k_norm = (RMSNorm(head_dim, config.rms_norm_eps, build, zero_centred=True) for _ in range(2))
        gates = self.heads.num_heads * head_dim
        self._sizes = (gates + 2 * self.heads.num_kv_heads * head_dim, gates)
        self._norms_apart = joint is not None
        self._index = index

    def project(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Project `norm(x)`, [T, hidden], to queries, keys and values [T, all heads * head_dim], and to gates."""
        joint = self.qkv_proj.forward(norm.forward(x)) if self._norms_apart else self.qkv_proj.forward(x, norm)
        qkv, gate = joint.split(self._sizes, -1)
        return qkv, gate

    def forward(self, qkv: Tensor, gate: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Attend; returns the input of `o_proj`, [T, query heads * head_dim]. `qkv` is overwritten."""
        qk_norm = QKNorm(self.q_norm.packed, self.k_norm.packed, self.q_norm.eps)
        return sigmoid_and_mul(attend(self.heads.split(qkv), rotation, ctx, self._index, qk_norm), gate)


class Qwen3NextMoE(nn.Module):
    """Routed experts, and a gated shared expert that every token goes through.

    If `can_fuse_shared_expert` allows it, the shared expert runs as one of the routed experts, else beside them.
    name: name of this module in the checkpoint.
    """

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, name: str):
        super().__init__()
        hidden_size, moe, width = config.hidden_size, config.moe, config.moe.shared_intermediate_size
        how = STANDARD_NAMES.find_quantization(config.quantization, f"{name}.experts")
        shared_how = find_quantization(config.quantization, f"{name}.shared_expert", *STANDARD_NAMES)
        among = (
            SHARED
            if can_fuse_shared_expert(moe.intermediate_size, width, build, same_format=shared_how == how)
            else None
        )
        self.gate = Router(hidden_size, moe.num_experts, moe.routing, build, shared=among)
        self.experts = Experts(
            moe.num_experts, hidden_size, moe.intermediate_size, build, shared=among, quantization=how
        )
        self.shared_expert = self.shared_expert_gate = None
        if among is None:
            self.shared_expert = GatedMLP(hidden_size, width, build, quantization=shared_how)
            self.shared_expert_gate = TokenGate(hidden_size, build)

    def forward(self, x: Tensor, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Return `residual` plus the experts' result for `norm(x)`; all [T, hidden]. `residual` may be overwritten."""
        normed = norm.forward(x)
        out = self.experts.forward(normed, *self.gate.forward(normed), residual)
        if self.shared_expert is None:
            return out
        shared, gate = self.shared_expert.forward(normed), self.shared_expert_gate.forward(normed)
        return torch.addcmul(out, shared.to(out.dtype), gate.to(out.dtype))


class Qwen3NextLayer(nn.Module):
    """Attention or recurrence, and a feed-forward layer; each adds its result to the residual stream.

    `before`, `mix` and `after` are separate so that torch.compile can take everything between two calls of `mix`.

    name: name of this module in the checkpoint.
    index: number of the layer's cache among the caches of its kind.
    """

    def __init__(
        self, config: Qwen3NextConfig, name: str, index: int, build: BuildContext, *, is_full: bool, is_sparse: bool
    ):
        super().__init__()
        quantization = config.quantization
        self.is_full = is_full
        self.is_sparse = is_sparse
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, build, zero_centred=True) for _ in range(2)
        )
        if is_full:
            self.self_attn = GatedAttention(config, index, build, f"{name}.self_attn")
        else:
            self.linear_attn = GatedDeltaNet(
                config.hidden_size,
                config.delta,
                index,
                build,
                in_quantization=find_quantization(quantization, f"{name}.linear_attn", "in_proj_qkvz"),
                out_quantization=find_quantization(quantization, f"{name}.linear_attn", "out_proj"),
            )
        dense = None if is_sparse else find_quantization(quantization, f"{name}.mlp", *STANDARD_NAMES)
        if is_sparse:
            self.mlp = Qwen3NextMoE(config, build, f"{name}.mlp")
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, build, quantization=dense)
        # The result of a fused norm and FP8 product has the norm's dtype, here float32: norm separately instead.
        self._norms_apart = dense is not None

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input of `mix` for the residual stream x [T, hidden]."""
        return (self.self_attn if self.is_full else self.linear_attn).project(x, self.input_layernorm)

    def mix(self, projected: tuple[Tensor, Tensor], rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Run attention or recurrence; see the `forward` of either module."""
        if self.is_full:
            return self.self_attn.forward(*projected, rotation, ctx)
        return self.linear_attn.forward(*projected, ctx)

    def after(self, mixed: Tensor, x: Tensor) -> Tensor:
        """Return the residual stream after the layer. mixed: result of `mix`. x: stream before; may be overwritten."""
        x = (self.self_attn.o_proj if self.is_full else self.linear_attn.out_proj).forward(mixed, x)
        if self._norms_apart:
            return self.mlp.forward(self.post_attention_layernorm.forward(x), x)
        return self.mlp.forward(x, x, self.post_attention_layernorm)

    @property
    def cache_spec(self) -> CacheSpec:
        """The spec of the layer's cache."""
        return self.self_attn.heads.cache_spec if self.is_full else self.linear_attn.cache_spec


def between(
    mixed: Tensor, x: Tensor, layer: Qwen3NextLayer, following: Qwen3NextLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute everything between two calls of `mix`; returns the residual stream and the inputs of the second call."""
    x = layer.after(mixed, x)
    return x, *following.before(x)


class Qwen3NextModel(nn.Module):
    """The model without its heads."""

    def __init__(self, config: Qwen3NextConfig, build: BuildContext):
        super().__init__()
        rotary_dim = config.rotary.rotary_dim(config.head_dim)
        self._rotary = RotaryEmbedding(config.rotary, rotary_dim, config.max_position_embeddings, build.device)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        counts = {True: 0, False: 0}
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            is_full, is_sparse = index in config.full_layers, index in config.moe.sparse_layers
            name = f"model.layers.{index}"
            layer = Qwen3NextLayer(config, name, counts[is_full], build, is_full=is_full, is_sparse=is_sparse)
            self.layers.append(layer)
            counts[is_full] += 1
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, zero_centred=True)
        # One compiled function can serve only pairs of layers of the same kinds.
        layers = [*self.layers]
        kinds = {_kind(layer, following) for layer, following in pairwise(layers)}
        self._between = {
            kind: compile_for_rows(between, MIN_COMPILED_ROWS) if build.compile else between for kind in kinds
        }

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute hidden states: token ids int [T] -> [T, hidden]."""
        rotation = self._rotary.plan(positions)
        x = self.embed_tokens.forward(input_ids)
        layer, *others = self.layers
        projected = layer.before(x)
        for following in others:
            mixed = layer.mix(projected, rotation, ctx)
            x, *rest = self._between[_kind(layer, following)](mixed, x, layer, following)
            projected = tuple(rest)
            layer = following
        return self.norm.forward(layer.after(layer.mix(projected, rotation, ctx), x))


def _kind(layer: Qwen3NextLayer, following: Qwen3NextLayer) -> tuple[bool, bool, bool]:
    return layer.is_full, layer.is_sparse, following.is_full


class MTPHead(nn.Module):
    """A head for multi-token prediction. Its weights are loaded, but nothing runs it yet.

    Its input is the normed embedding of a token beside the normed hidden state before the token, projected by `fc`.
    """

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, *, is_sparse: bool):
        super().__init__()
        hidden_size = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            RMSNorm(hidden_size, config.rms_norm_eps, build, zero_centred=True) for _ in range(3)
        )
        self.fc = ColumnParallelLinear(2 * hidden_size, (LinearPart("fc", hidden_size),), build)
        name, index = f"{MTP}layers.0", len(config.full_layers)
        layer = Qwen3NextLayer(config, name, index, build, is_full=True, is_sparse=is_sparse)
        self.layers = nn.ModuleList([layer])


class Qwen3NextForCausalLM(nn.Module):
    """The complete model; implements `nanovllm_core.model.CausalLM`.

    make_mtp: makes the head for multi-token prediction; None for a checkpoint without one.
    """

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, make_mtp: Callable[[], MTPHead] | None = None):
        super().__init__()
        self.model = Qwen3NextModel(config, build)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, build, tied)
        self.mtp = None if make_mtp is None else make_mtp()

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute hidden states: token ids int [T] -> [T, hidden]."""
        return self.model.forward(input_ids, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: hidden states [n, hidden] -> float32 [n, vocab_size]."""
        return self.lm_head.forward(hidden)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return one cache spec per layer, without the head for multi-token prediction."""
        return tuple(layer.cache_spec for layer in self.model.layers)


def build_qwen3_next(build: BuildContext, *, config: Qwen3NextConfig, weights: WeightSource) -> Qwen3NextForCausalLM:
    """Build the model on its device and load its weights. Raises WeightError, ModelError."""
    # No field of config.json says whether the checkpoint has a head for multi-token prediction.
    head = [name for name in weights.names() if name.startswith(MTP)]
    make_mtp = None
    if head:
        make_mtp = partial(MTPHead, config, build, is_sparse=any(".mlp.experts." in name for name in head))
    model = Qwen3NextForCausalLM(config, build, make_mtp)
    weights.fill(model, is_redundant)
    return model


def build_spec(path: Path, fields: Fields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    build = partial(build_qwen3_next, config=config, weights=weights)
    return make_model_spec(path, fields, config, name, build)
