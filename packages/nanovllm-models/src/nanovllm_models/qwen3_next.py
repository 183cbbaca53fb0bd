"""Qwen3-Next (https://qwenlm.github.io/blog/qwen3_next/): layers of Gated DeltaNet or gated attention, with experts.

In shapes, T is the number of tokens of a step.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from nanovllm_core.layers.attention import HeadLayout, QKNorm, attend, query_part
from nanovllm_core.layers.compilation import MIN_COMPILED_ROWS, compile_for_rows
from nanovllm_core.layers.embedding import VocabEmbedding
from nanovllm_core.layers.gated_attention import GatedQKVLinear
from nanovllm_core.layers.gated_delta_net import GatedDeltaNet
from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.moe import MLP_LINEAR_NAMES, Experts, Router, SharedExpertNames, TokenGate, can_fuse_shared
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import find_quantization
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.rotary import RotaryEmbedding, Rotation
from nanovllm_core.model import BuildContext, CacheSpec, ForwardContext, ModelSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.elementwise import sigmoid_and_mul
from nanovllm_models.checkpoint import RandomWeights, WeightSource
from nanovllm_models.fields import JsonFields
from nanovllm_models.llama import can_skip_tensor
from nanovllm_models.model_spec import DecoderWithHead, make_model_spec
from nanovllm_models.mtp import has_mtp_heads
from nanovllm_models.qwen3_next_config import Qwen3NextConfig, parse_config

MTP_PREFIX = "mtp."
# Names of the shared expert and its gate in checkpoints.
SHARED_EXPERT_NAMES = SharedExpertNames("shared_expert", "shared_expert_gate")


class GatedAttention(nn.Module):
    """Grouped-query attention whose result is multiplied by a gate, element by element.

    cache_index: index of this module's cache in `ForwardContext.kv_caches`.
    name: name of this module in the checkpoint.
    """

    def __init__(self, config: Qwen3NextConfig, cache_index: int, build: BuildContext, name: str):
        super().__init__()
        build = build.for_attention()
        qkv_quantization = find_quantization(config.quantization, name, "q_proj", "k_proj", "v_proj")
        o_quantization = find_quantization(config.quantization, name, "o_proj")
        num_heads, num_kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden_size, bias = config.hidden_size, config.attention_bias
        self.heads = HeadLayout.for_rank(num_heads, num_kv_heads, head_dim, build.parallel)
        self.qkv_proj = GatedQKVLinear(
            hidden_size, num_heads, num_kv_heads, head_dim, build, bias=bias, quantization=qkv_quantization
        )
        self.o_proj = RowParallelLinear(
            num_heads * head_dim,
            hidden_size,
            build,
            name="o_proj",
            own_columns=query_part("q_proj", num_heads, num_kv_heads, head_dim, bias=bias).own_rows(build.parallel),
            bias=bias,
            quantization=o_quantization,
        )
        self.q_norm, self.k_norm = (RMSNorm(head_dim, config.rms_norm_eps, build, zero_centred=True) for _ in range(2))
        gate_width = self.heads.num_heads * head_dim
        self._projected_widths = (gate_width + 2 * self.heads.num_kv_heads * head_dim, gate_width)
        # Whether `qkv_proj` applies the norm. An FP8 `qkv_proj` would return the dtype of the norm's weight, float32.
        self._is_norm_fused = qkv_quantization is None
        self._cache_index = cache_index

    def project(self, x: Tensor, norm: RMSNorm | None) -> tuple[Tensor, Tensor]:
        """Project norm(x), x [T, hidden], to the inputs `qkv` and `gate` of `forward`. norm: None if x is normed."""
        if norm is not None and not self._is_norm_fused:
            x, norm = norm.forward(x), None
        qkv, gate = self.qkv_proj.forward(x, norm).split(self._projected_widths, -1)
        return qkv, gate

    def forward(self, qkv: Tensor, gate: Tensor, rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Attend; returns [T, query heads * head_dim]. qkv: [T, all heads * head_dim], overwritten."""
        qk_norm = QKNorm(self.q_norm.packed_weight, self.k_norm.packed_weight, self.q_norm.eps)
        return sigmoid_and_mul(attend(self.heads.view_heads(qkv), rotation, ctx, self._cache_index, qk_norm), gate)


class Qwen3NextMoE(nn.Module):
    """Routed experts and a gated shared expert. name: name of this module in the checkpoint.

    `shared_expert` is None if `experts` also computes the shared expert.
    """

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, name: str):
        super().__init__()
        self._parallel = build.parallel
        hidden_size, moe, width = config.hidden_size, config.moe, config.shared_intermediate_size
        quantization = MLP_LINEAR_NAMES.find_quantization(config.quantization, f"{name}.experts")
        shared_quantization = find_quantization(config.quantization, f"{name}.shared_expert", *MLP_LINEAR_NAMES)
        has_same_format = shared_quantization == quantization
        is_fused = can_fuse_shared(moe.intermediate_size, width, build, same_format=has_same_format)
        shared_expert = SHARED_EXPERT_NAMES if is_fused else None
        self.gate = Router(hidden_size, moe.num_experts, moe.routing, build, shared=shared_expert)
        self.experts = Experts(
            moe.num_experts, hidden_size, moe.intermediate_size, build, shared=shared_expert, quantization=quantization
        )
        self.shared_expert = self.shared_expert_gate = None
        if shared_expert is None:
            self.shared_expert = GatedMLP(
                hidden_size,
                width,
                build,
                size_name="shared_expert_intermediate_size",
                quantization=shared_quantization,
            )
            self.shared_expert_gate = TokenGate(hidden_size, build)

    def forward(self, x: Tensor, stream: ResidualStream, norm: RMSNorm | None) -> ResidualStream:
        """Add the experts' result for norm(x) [T, hidden] to `stream`. norm: None if x is already normed."""
        normed = x if norm is None else norm.forward(x)
        stream = self.experts.forward(normed, *self.gate.forward(normed), stream)
        if self.shared_expert is None:
            return stream
        shared, gate = self.shared_expert.compute_partial(normed), self.shared_expert_gate.forward(normed)

        def add_shared(base: Tensor | None) -> Tensor:
            if base is None:
                return shared * gate.to(shared.dtype)
            return torch.addcmul(base, shared.to(base.dtype), gate.to(base.dtype))

        return stream.add(self._parallel, add_shared)


class Qwen3NextLayer(nn.Module):
    """Gated attention or Gated DeltaNet, and a feed-forward layer. Callers run `before_mix`, `mix`, then `after_mix`.

    name: name of this module in the checkpoint.
    cache_index: index of the layer's cache in `ForwardContext.kv_caches` or `ForwardContext.state_caches`.
    """

    def __init__(
        self,
        config: Qwen3NextConfig,
        name: str,
        cache_index: int,
        build: BuildContext,
        has_attention: bool,
        has_experts: bool,
    ):
        super().__init__()
        quantization = config.quantization
        self.has_attention = has_attention
        self.has_experts = has_experts
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps, build, zero_centred=True) for _ in range(2)
        )
        if has_attention:
            self.self_attn = GatedAttention(config, cache_index, build, f"{name}.self_attn")
        else:
            self.linear_attn = GatedDeltaNet(
                config.hidden_size,
                config.delta,
                cache_index,
                build,
                in_quantization=find_quantization(quantization, f"{name}.linear_attn", "in_proj_qkvz"),
                out_quantization=find_quantization(quantization, f"{name}.linear_attn", "out_proj"),
            )
        mlp_quantization = None if has_experts else find_quantization(quantization, f"{name}.mlp", *MLP_LINEAR_NAMES)
        if has_experts:
            self.mlp = Qwen3NextMoE(config, build, f"{name}.mlp")
        else:
            self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, build, quantization=mlp_quantization)
        # Whether `mlp` applies the norm. Not if it has no experts and is quantised, as explained in `GatedAttention`.
        self._is_norm_fused = mlp_quantization is None

    def before_mix(self, stream: ResidualStream) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual stream [T, hidden], with all ranks' results added, and the two inputs of `mix`."""
        x, layer_input, norm = self.input_layernorm.add_partials(stream)
        return x, *(self.self_attn if self.has_attention else self.linear_attn).project(layer_input, norm)

    def mix(self, projected: tuple[Tensor, Tensor], rotation: Rotation, ctx: ForwardContext) -> Tensor:
        """Run the token mixer (gated attention or Gated DeltaNet) on the results of `before_mix`."""
        if self.has_attention:
            return self.self_attn.forward(*projected, rotation, ctx)
        return self.linear_attn.forward(*projected, ctx)

    def after_mix(self, mixer_output: Tensor, x: Tensor) -> ResidualStream:
        """Return the residual stream after the layer. x: residual stream before the layer; may be overwritten."""
        out_proj = self.self_attn.o_proj if self.has_attention else self.linear_attn.out_proj
        stream = out_proj.forward(mixer_output, ResidualStream(x))
        x, layer_input, norm = self.post_attention_layernorm.add_partials_and_gather_requests(stream)
        if norm is not None and not self._is_norm_fused:
            layer_input, norm = norm.forward(layer_input), None
        return self.mlp.forward(layer_input, ResidualStream(x), norm)

    @property
    def cache_spec(self) -> CacheSpec:
        """The shape of the layer's cache or state."""
        return self.self_attn.heads.cache_spec if self.has_attention else self.linear_attn.cache_spec


def run_between_mixes(
    mixer_output: Tensor, x: Tensor, layer: Qwen3NextLayer, next_layer: Qwen3NextLayer
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the code between two calls of `mix`; returns the residual stream and the inputs of the next `mix`."""
    return next_layer.before_mix(layer.after_mix(mixer_output, x))


class Qwen3NextModel(nn.Module):
    """The decoder: the model without its output head."""

    def __init__(self, config: Qwen3NextConfig, build: BuildContext):
        super().__init__()
        rotary_dim = config.rotary.rotary_dim(config.head_dim)
        self._rotary = RotaryEmbedding(config.rotary, rotary_dim, config.max_position, build.device)
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, build)
        # Index of the next cache, for each kind of layer. Keys: has_attention.
        cache_indices = {True: 0, False: 0}
        self.layers = nn.ModuleList()
        for index in range(config.num_hidden_layers):
            has_attention, has_experts = index in config.attention_layers, index in config.moe.sparse_layers
            name = f"model.layers.{index}"
            self.layers.append(
                Qwen3NextLayer(config, name, cache_indices[has_attention], build, has_attention, has_experts)
            )
            cache_indices[has_attention] += 1
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, build, zero_centred=True)
        # A compiled function runs parts of two consecutive layers, with one function per combination of their kinds.
        kinds = {_classify_pair(layer, next_layer) for layer, next_layer in pairwise([*self.layers])}
        self._run_between = {
            kind: compile_for_rows(run_between_mixes, MIN_COMPILED_ROWS) if build.compile else run_between_mixes
            for kind in kinds
        }

    def plan_rotation(self, positions: Tensor) -> Rotation:
        """Plan the rotation of a step's tokens. positions: int64 [T]."""
        return self._rotary.plan(positions)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden]."""
        rotation = self.plan_rotation(positions)
        layer, *later_layers = self.layers
        x, *inputs = layer.before_mix(ResidualStream(self.embed_tokens.forward(input_ids)))
        projected = tuple(inputs)
        for next_layer in later_layers:
            mixer_output = layer.mix(projected, rotation, ctx)
            x, *inputs = self._run_between[_classify_pair(layer, next_layer)](mixer_output, x, layer, next_layer)
            projected = tuple(inputs)
            layer = next_layer
        return self.norm.normalize(layer.after_mix(layer.mix(projected, rotation, ctx), x))


def _classify_pair(layer: Qwen3NextLayer, next_layer: Qwen3NextLayer) -> tuple[bool, bool, bool]:
    return layer.has_attention, layer.has_experts, next_layer.has_attention


class MTPHead(nn.Module):
    """A head for multi-token prediction. `MTPPredictor` adds the weights that the head shares with the model.

    `fc` projects the concatenation of a token's normed embedding and the previous token's normed hidden state.
    """

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, *, has_experts: bool):
        super().__init__()
        hidden_size = config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            RMSNorm(hidden_size, config.rms_norm_eps, build, zero_centred=True) for _ in range(3)
        )
        # Each rank has the whole matrix, which is small. No exchange is needed.
        unsplit_build = replace(build, parallel=ParallelContext())
        self.fc = ColumnParallelLinear(2 * hidden_size, (LinearPart("fc", hidden_size),), unsplit_build)
        name, cache_index = f"{MTP_PREFIX}layers.0", len(config.attention_layers)
        layer = Qwen3NextLayer(config, name, cache_index, build, has_attention=True, has_experts=has_experts)
        self.layers = nn.ModuleList([layer])

    def forward(self, embedded: Tensor, rotation: Rotation, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden]. embedded: [T, hidden], embeddings of the tokens after those of `hidden`."""
        (layer,) = self.layers
        normed = self.pre_fc_norm_embedding.forward(embedded), self.pre_fc_norm_hidden.forward(hidden)
        x = self.fc.forward(torch.cat(normed, 1)).to(embedded.dtype)
        x, *projected = layer.before_mix(ResidualStream(x))
        return self.norm.normalize(layer.after_mix(layer.mix(tuple(projected), rotation, ctx), x))


class Qwen3NextForCausalLM(DecoderWithHead):
    """The complete model. make_mtp: makes the head for multi-token prediction; None for no head."""

    def __init__(self, config: Qwen3NextConfig, build: BuildContext, make_mtp: Callable[[], MTPHead] | None = None):
        super().__init__(Qwen3NextModel(config, build), config, build)
        self.mtp = None if make_mtp is None else make_mtp()

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Return the cache spec of each decoder layer, then of the layer for multi-token prediction."""
        layers = [*self.model.layers, *(() if self.mtp is None else self.mtp.layers)]
        return tuple(layer.cache_spec for layer in layers)

    def mtp_head(self) -> "MTPPredictor | None":
        """Return the head for multi-token prediction; None if the model has no head."""
        return None if self.mtp is None else MTPPredictor(self, self.mtp)


class MTPPredictor:
    """A `PredictionHead`: an `MTPHead` together with the embedding and the output head of the model."""

    def __init__(self, model: Qwen3NextForCausalLM, head: MTPHead):
        self._decoder = model.model
        self._head = head
        self.compute_logits = model.compute_logits

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden]. See `PredictionHead.forward`."""
        embedded = self._decoder.embed_tokens.forward(input_ids)
        return self._head.forward(embedded, self._decoder.plan_rotation(positions), hidden, ctx)


def build_qwen3_next(build: BuildContext, *, config: Qwen3NextConfig, weights: WeightSource) -> Qwen3NextForCausalLM:
    """Build the model on its device and load its weights. Raises WeightError, ModelError."""
    make_mtp, skipped_prefixes = None, (MTP_PREFIX,)
    # Published checkpoints have a head that config.json does not declare, so random weights have a head too.
    num_declared = max(config.num_mtp_heads, int(isinstance(weights, RandomWeights)))
    if has_mtp_heads(weights, (MTP_PREFIX,), num_declared) and build.uses_mtp:
        # config.json does not say whether the head has experts. Random weights have no names: their head has experts.
        names = weights.names()
        has_experts = not names or any(name.startswith(MTP_PREFIX) and ".mlp.experts." in name for name in names)
        make_mtp, skipped_prefixes = partial(MTPHead, config, build, has_experts=has_experts), ()
    model = Qwen3NextForCausalLM(config, build, make_mtp)
    weights.load_into(model, partial(can_skip_tensor, skipped_prefixes=skipped_prefixes))
    return model


def build_spec(path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
    """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
    config = parse_config(fields)
    build = partial(build_qwen3_next, config=config, weights=weights)
    return make_model_spec(path, fields, config, name, build)
