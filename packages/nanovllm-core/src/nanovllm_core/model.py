"""The interface between the engine and a model. The engine serves any `CausalLM`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.linear_attention import StateBatch

# Computes one layer's attention: (queries, batch) -> result.
AttentionFunction = Callable[[Tensor, AttentionBatch], Tensor]


class LaunchAttention(Protocol):
    """Runs a layer's attention outside of a CUDA graph; see `ForwardContext.launch_attention`."""

    def __call__(self, attention: AttentionFunction, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """The result of `attention`, [T, heads, value_dim]. q: [T, heads, head_dim]; value_dim: None for head_dim."""
        ...


class PagedSpec(NamedTuple):
    """The shape of one attention layer's KV cache, per rank. num_heads: number of query heads."""

    num_kv_heads: int
    head_dim: int
    num_heads: int


class MLASpec(NamedTuple):
    """The shape of one latent attention layer's cache. A row holds a token's latent, then its rotated key part.

    num_heads: number of query heads; all heads share a token's row.
    """

    latent_dim: int
    rope_dim: int
    num_heads: int


class StateSpec(NamedTuple):
    """The shapes of one recurrent layer's state, per sequence and rank.

    recurrent: the recurrent state, in the engine's `state_dtype`.
    conv: the last inputs of the convolution, in the model's dtype.
    """

    recurrent: tuple[int, int, int]
    conv: tuple[int, int]


CacheSpec = PagedSpec | MLASpec | StateSpec


class StateCache(NamedTuple):
    """One recurrent layer's states of all sequences. Each tensor is [num_slots, *shape in StateSpec]."""

    recurrent: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The batch of one forward pass. Each request's tokens are contiguous; requests with one token come first.

    attention_batch: lengths and block tables for the attention kernels.
    slot_mapping: int64 [num_tokens], each token's cache slot: block * block_size + offset.
    kv_caches: one tensor per PagedSpec or MLASpec, in the order of `CausalLM.cache_specs`.
        PagedSpec: [num_blocks, block_size, 2 * num_kv_heads, head_dim], key heads before value heads.
        MLASpec: [num_blocks, block_size, 1, latent_dim + rope_dim].
    kv_scales: one tensor per FP8 cache, uint8 [num_blocks, cache.shape[2], block_size]; empty for other caches.
    launch_attention: layers pass their attention and queries to this function. None: layers compute attention directly.
        Set while a step is captured in pieces, because attention then runs between two CUDA graphs.
    state_caches: one per StateSpec, in the order of `CausalLM.cache_specs`.
    state_batch: state slots of the batch's requests; None for a model without recurrent layers.
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
        """Hidden states [num_tokens, hidden]. input_ids: int32 [num_tokens]; positions: int64 [num_tokens]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden], the same on every rank."""
        ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache spec of each layer. All attention layers have the same spec, because they share a block table."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Options for building a model. compile: whether to use torch.compile; a model may ignore this option."""

    device: torch.device
    dtype: torch.dtype
    parallel: ParallelContext
    compile: bool = False


class Vocabulary(NamedTuple):
    """The text of a model's tokens, for grammars.

    tokens: each token's bytes, by token id; b"" for a token without text. May be shorter than vocab_size: higher ids
        have no text.
    end_ids: token ids that end an answer, a subset of the model's `eos_token_ids`.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model that the engine can build. Must be picklable, to be sent to the engine's process.

    vocab_size: number of logits per token.
    max_position: longest sequence in tokens.
    eos_token_ids: token ids that end a sequence.
    dtype: dtype of the checkpoint.
    build: creates the model and loads its weights.
    vocabulary: returns the vocabulary; called for the first grammar. None for a model without grammars.
    cuda_dtype: dtype on a GPU; None for `dtype`.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[BuildContext], CausalLM]
    vocabulary: Callable[[], Vocabulary] | None = None
    cuda_dtype: torch.dtype | None = None
