"""Defines the interface between the engine and a model. The engine serves any model that implements `CausalLM`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.linear_attention import StateBatch, conv_state_shape

# Computes one layer's attention from the queries and the batch.
AttentionFunction = Callable[[Tensor, AttentionBatch], Tensor]


class LaunchAttention(Protocol):
    """Computes a layer's attention outside of captured CUDA graphs."""

    def __call__(self, attention: AttentionFunction, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """Call `attention` with q [num_tokens, heads, head_dim]; returns [num_tokens, heads, value_dim].

        value_dim: size of a head's value; None means head_dim.
        """
        ...


class PagedSpec(NamedTuple):
    """This rank's part of an attention layer's KV cache. num_heads: number of query heads."""

    num_kv_heads: int
    head_dim: int
    num_heads: int


class MLASpec(NamedTuple):
    """The cache of one MLA layer. All heads share one entry per token: the latent vector and the rotated key."""

    latent_dim: int
    rope_dim: int
    num_heads: int


class StateSpec(NamedTuple):
    """Shapes of the state that one recurrent layer keeps per sequence and rank.

    recurrent: (value heads, value dim, key dim) of the recurrent state, whose dtype is `EngineConfig.state_dtype`.
    conv_inputs: (filter taps, channels) of the latest inputs of the convolution, in the model's dtype.
    """

    recurrent: tuple[int, int, int]
    conv_inputs: tuple[int, int]

    def with_drafts(self, max_drafts: int) -> "StateSpec":
        """The shapes with space for the inputs of up to `max_drafts` drafts per step, see `conv_state_shape`."""
        num_taps, num_channels = self.conv_inputs
        return self._replace(conv_inputs=conv_state_shape(num_taps, num_channels, self.recurrent[0], max_drafts))


CacheSpec = PagedSpec | MLASpec | StateSpec


class StateCache(NamedTuple):
    """The states of a recurrent layer: [num_state_slots, *shape]. `StateSpec.with_drafts` gives each shape."""

    recurrent: Tensor
    conv_inputs: Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The batch of one forward pass. The tokens of each request are contiguous. Decodes come before prompts.

    attention_batch: lengths and block tables for the attention kernels.
    slot_mapping: int64 [num_tokens], each token's slot in the KV cache: block * block_size + offset.
    kv_caches: one per PagedSpec or MLASpec, in the order of `CausalLM.cache_specs`.
        PagedSpec: [num_blocks, block_size, 2 * num_kv_heads, head_dim], key heads before value heads.
        MLASpec: [num_blocks, block_size, 1, latent_dim + rope_dim].
    kv_scales: one per cache, uint8 [num_blocks, cache.shape[2], block_size], see `nanovllm_kernels.fp8`; empty if the
        caches are not FP8.
    launch_attention: while a step is captured as several CUDA graphs, computes attention between the graphs. Layers
        must call this function with their attention and queries. None: layers compute attention themselves.
    state_caches: one per StateSpec, in the order of `CausalLM.cache_specs`.
    state_batch: state slots of the requests; None for a model without recurrent layers.
    """

    attention_batch: AttentionBatch
    slot_mapping: Tensor
    kv_caches: tuple[Tensor, ...]
    kv_scales: tuple[Tensor, ...] = ()
    launch_attention: LaunchAttention | None = None
    state_caches: tuple[StateCache, ...] = ()
    state_batch: StateBatch | None = None


class CausalLM(Protocol):
    """A language model with loaded weights."""

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Returns hidden states [num_tokens, hidden] of the step's tokens, including padding.

        input_ids: int32 [num_tokens]. positions: int64 [num_tokens].
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits of hidden states [n, hidden], preferably in float32.

        hidden: equal on all ranks.
        With one rank, the logits are [n, vocab_size]. With several ranks, each rank returns its columns: [n, c], with
        the same c on all ranks. The columns of all ranks, in order, stand for the vocabulary and then for padding.
        """
        ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache spec of each layer, in order. All attention layers must have the same spec."""
        ...


class PredictionHead(Protocol):
    """A head for multi-token prediction (MTP).

    Predicts the token at position p + 2 from the token at p + 1 and the hidden state at p. The head's layers have
    caches like the model's attention layers. The specs of these caches are at the end of the model's `cache_specs`.
    """

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Returns hidden states [num_tokens, hidden] of the head, from which the head can predict further tokens.

        input_ids: int32 [num_tokens], the token after each position. positions: int64 [num_tokens].
        hidden: [num_tokens, hidden], hidden states of the model or of the head at `positions`.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Returns logits of the token after each token in the `input_ids` of `forward`, see `CausalLM.compute_logits`.

        hidden: result of the head's `forward`.
        """
        ...


@runtime_checkable
class MultiTokenModel(Protocol):
    """A `CausalLM` that may have a head for multi-token prediction."""

    def mtp_head(self) -> PredictionHead | None:
        """The head; None if the weights include no head, or if `BuildContext.uses_mtp` is False."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Options for building a model.

    compile: use torch.compile between attention operators if the model can.
    uses_mtp: build the heads for multi-token prediction, if the weights include such heads.
    """

    device: torch.device
    dtype: torch.dtype
    parallel: ParallelContext
    compile: bool = False
    uses_mtp: bool = False

    def for_attention(self) -> "BuildContext":
        """The context for the embedding, attention and recurrent layers, see `ParallelContext.for_attention`."""
        return replace(self, parallel=self.parallel.for_attention())


class Vocabulary(NamedTuple):
    """The text of a model's tokens, for grammars.

    tokens: the bytes of each token, indexed by token id; b"" for a token without text. Ids beyond the end have no text.
    end_ids: token ids that end an answer, a subset of the model's `eos_token_ids`.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model that the engine can build. `EngineClient` pickles the spec to send it to the engine.

    vocab_size: number of logits per token.
    max_position: maximum number of tokens of a sequence.
    dtype: dtype of the checkpoint.
    build: creates the model with its weights. For pickling: a module-level function or class, or a partial of one.
    vocabulary: reads the vocabulary, when the first grammar is needed; None if the model does not support grammars.
    cuda_dtype: dtype on a GPU; None for `dtype`. float16 is more precise than bfloat16, but may overflow.
    fingerprint: identifies everything that determines cache entries, such as the weights; "" if unknown. Engines
        whose models have equal fingerprints may share cached blocks in files and by transfers.
    draft: the draft model for speculative decoding with `EngineConfig.speculate` "draft"; None without a draft model.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[BuildContext], CausalLM]
    vocabulary: Callable[[], Vocabulary] | None = None
    cuda_dtype: torch.dtype | None = None
    fingerprint: str = ""
    draft: "ModelSpec | None" = None
