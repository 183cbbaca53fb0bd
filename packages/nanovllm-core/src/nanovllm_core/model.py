"""The interface between engine and model. The engine serves any model that implements these protocols."""

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
    """Runs a layer's attention outside of a captured graph, see `ForwardContext.launch_attention`."""

    def __call__(self, attention: AttentionFunction, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """The result [T, heads, value_dim] of `attention` for `q` [T, heads, head_dim].

        value_dim: None for head_dim.
        """
        ...


class PagedSpec(NamedTuple):
    """The KV cache of one attention layer, per rank. num_heads: query heads that read the cache."""

    num_kv_heads: int
    head_dim: int
    num_heads: int


class MLASpec(NamedTuple):
    """The cache of one latent attention layer: per token the latent, then the rotated key part, shared by all heads.

    num_heads: query heads that read the cache.
    """

    latent_dim: int
    rope_dim: int
    num_heads: int


class StateSpec(NamedTuple):
    """The state that one recurrent layer keeps per sequence and rank.

    recurrent: shape of the recurrent state; its dtype is the engine's `state_dtype`.
    conv: shape of the last inputs of the convolution; they have the model's dtype.
    """

    recurrent: tuple[int, int, int]
    conv: tuple[int, int]


CacheSpec = PagedSpec | MLASpec | StateSpec


class StateCache(NamedTuple):
    """One recurrent layer's states: recurrent [num_slots, *spec.recurrent], conv [num_slots, *spec.conv]."""

    recurrent: Tensor
    conv: Tensor


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The batch of one forward pass: the tokens of its requests one after another, decodes first.

    attention_batch: lengths and block tables for the attention kernels.
    slot_mapping: int64 [num_tokens], the cache slot (block * block_size + offset) of each token.
    kv_caches: one per PagedSpec or MLASpec, in the order of `CausalLM.cache_specs`. PagedSpec: [num_blocks, block_size,
        2 * num_kv_heads, head_dim], key heads before value heads. MLASpec: [num_blocks, block_size, 1, latent_dim +
        rope_dim].
    kv_scales: one per cache if the caches are FP8, else empty. uint8 [num_blocks, heads, block_size], where heads is
        the third dimension of the cache; see `nanovllm_kernels.fp8`.
    launch_attention: if set, a layer calls this function with its attention and queries instead of computing attention.
        It is set while a step is captured in pieces: attention runs between the captured graphs and is launched anew at
        each replay.
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
    """A language model on its device, weights loaded."""

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states [num_tokens, hidden]. input_ids: int32 [num_tokens]. positions: int64 [num_tokens]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden], gathered over ranks, preferably in float32."""
        ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """The cache spec of each layer, in order. All attention layers have the same spec and share one block table."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Options for building a model.

    compile: use torch.compile between attention operators. A model may ignore it.
    """

    device: torch.device
    dtype: torch.dtype
    parallel: ParallelContext
    compile: bool = False


class Vocabulary(NamedTuple):
    """The text of a model's tokens.

    tokens: by token id, the bytes that the token adds to a text; b"" for tokens without text, which grammars allow only
        by their id. May be shorter than vocab_size; the remaining tokens have no text.
    end_ids: token ids that end an answer, a subset of the model's `eos_token_ids`.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The description of a model that the engine can build. It can be sent to another process by pickle.

    vocab_size: number of logits per token.
    max_position: longest sequence in tokens.
    eos_token_ids: token ids that end a sequence.
    dtype: dtype of the checkpoint.
    build: creates the model with its weights; a module-level function or a functools.partial of one.
    vocabulary: returns the vocabulary; called for the first grammar. None for a model without grammars.
    cuda_dtype: dtype on a GPU; None for `dtype`. float16 has three more bits than bfloat16 and the same speed, but
        float16 is safe only for a model whose largest numbers are known.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[BuildContext], CausalLM]
    vocabulary: Callable[[], Vocabulary] | None = None
    cuda_dtype: torch.dtype | None = None
