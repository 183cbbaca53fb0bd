"""What the engine asks of a model. Any object that answers to these protocols can be served.

This room must not know any architecture, file format or schedule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import AttentionBatch
from nanovllm_kernels.linear_attention import StateBatch

# Attention of one layer: from its queries and a batch to what they see.
Attention = Callable[[Tensor, AttentionBatch], Tensor]


class Launch(Protocol):
    """Stands for a layer's attention, see `ForwardContext.launch`."""

    def __call__(self, attention: Attention, q: Tensor, /, value_dim: int | None = None) -> Tensor:
        """What `attention` makes of `q` [T, heads, head_dim]: [T, heads, value_dim], by default as wide as `q`."""
        ...


class PagedSpec(NamedTuple):
    """The KV cache that one attention layer wants, per rank, and how many query heads read it."""

    num_kv_heads: int
    head_dim: int
    num_heads: int


class MLASpec(NamedTuple):
    """The cache of one layer of latent attention: a token's latent, then its rotated key part, shared by all heads."""

    latent_dim: int
    rope_dim: int
    num_heads: int


class StateSpec(NamedTuple):
    """What one recurrent layer keeps of a whole sequence, per rank: the shapes of its recurrent state, which is of the
    engine's `state_dtype`, and of the inputs that its convolution still needs, which are of the model's dtype.
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
    """What one forward pass needs to know of its batch: requests one after another, decodes first.

    attention: lengths and block tables, as the attention kernels want them. slot_mapping: int64 [num_tokens], the cache
    slot (block * block_size + offset) each token's keys and values go to. kv_caches: one a PagedSpec, in the order of
    `CausalLM.cache_specs`, each [num_blocks, block_size, 2 * num_kv_heads, head_dim]: in each slot the key heads, then
    the value heads; or one an MLASpec, each [num_blocks, block_size, 1, latent_dim + rope_dim]. kv_scales: where the
    caches are FP8 one each, uint8 [num_blocks, heads of a slot, block_size], of every head of every slot (see
    `nanovllm_kernels.fp8`), else none. launch: called, if there, with a layer's attention
    and its queries, in place of the attention itself: while a step is captured in pieces, between which attention is
    launched anew each time. state_caches: one a StateSpec, in the order of `CausalLM.cache_specs`; states: which of
    their slots are whose.
    """

    attention: AttentionBatch
    slot_mapping: Tensor
    kv_caches: tuple[Tensor, ...]
    kv_scales: tuple[Tensor, ...] = ()
    launch: Launch | None = None
    state_caches: tuple[StateCache, ...] = ()
    states: StateBatch | None = None


class CausalLM(Protocol):
    """A language model on its device, weights loaded."""

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Hidden states [num_tokens, hidden] of int32 `input_ids` [num_tokens] at int64 `positions` [num_tokens]."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden], gathered over ranks; best in float32."""
        ...

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer wants cached, in their order; all that are paged are alike and share one block table."""
        ...


@dataclass(frozen=True, slots=True)
class BuildContext:
    """Where and how a model is to be built.

    compile: use torch.compile on what lies between attention operators; a model may have nothing to gain by it.
    """

    device: torch.device
    dtype: torch.dtype
    parallel: ParallelContext
    compile: bool = False


class Vocabulary(NamedTuple):
    """What a model's tokens stand for.

    tokens: by id, the bytes that each adds to a text; b"" for one that is no text, and that no grammar lets come but by
        its id. May be shorter than the logits are wide: what lies behind is no text either. end_ids: those that end an
        answer, among the `eos_token_ids` of the model.
    """

    tokens: Sequence[bytes]
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that the engine can build: everything it must know beforehand, and how to get it.

    vocab_size: rows of the logits. max_position: longest sequence. dtype: the checkpoint's. cuda_dtype: what a GPU is
    to compute in instead, if anything: float16 is as fast as bfloat16 and keeps three bits more, but only a model
    whose largest numbers are known may be trusted to it. eos_token_ids: ids that end a sequence. build: makes the
    model, weights included, in the process that will run it; a module-level function or a functools.partial of one,
    since the spec may travel to that process by pickle. vocabulary: likewise, called when a request first asks for a
    grammar; without it none can.
    """

    name: str
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    build: Callable[[BuildContext], CausalLM]
    vocabulary: Callable[[], Vocabulary] | None = None
    cuda_dtype: torch.dtype | None = None
