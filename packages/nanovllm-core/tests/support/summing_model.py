"""A model whose next token is a weighted sum of all cached tokens, so that tests notice a wrong cache entry."""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from nanovllm_core import BuildContext, CacheSpec, ForwardContext, ModelSpec, PagedSpec

VOCAB, LONGEST, MARGIN = 97, 256, 60.0


def sum_entries(ids: Tensor, ctx: ForwardContext, cache_index: int, shift: int) -> tuple[Tensor, Tensor]:
    """Write `ids` to the cache. Returns (sum of the entries up to each token, first entry of each token's request)."""
    cache = ctx.kv_caches[cache_index]
    entries = cache.view(cache.shape[0] * cache.shape[1], -1)[:, 0]
    entries[ctx.slot_mapping] = ids.float()
    batch, block_size = ctx.attention_batch, cache.shape[1]
    sums, firsts = torch.zeros(2, len(ids))
    starts = batch.query_start_loc.tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        length = int(batch.seq_lens[request])
        positions = torch.arange(length)
        own_entries = entries[
            batch.block_tables[request, positions // block_size] * block_size + positions % block_size
        ]
        totals = (own_entries * (positions + 1 + shift)).cumsum(0)
        sums[start:end] = totals[length - (end - start) :]
        firsts[start:end] = own_entries[0]
    return sums, firsts


def make_logits(tokens: Tensor) -> Tensor:
    logits = torch.zeros(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), tokens.long() % VOCAB] = MARGIN
    return logits


class SummingLM:
    """Hidden states are pairs (sum, first token). A prediction is wrong if `error_interval` divides the sum."""

    def __init__(self, error_interval: int | None, build: BuildContext):
        self._error_interval = error_interval
        self._has_head = build.uses_mtp

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        del positions
        return torch.stack(sum_entries(input_ids, ctx, 0, 0), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        sums = hidden[:, 0]
        return make_logits(sums if self._error_interval is None else sums + (sums % self._error_interval == 0))

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (PagedSpec(1, 16, 1),) * (1 + self._has_head)

    def mtp_head(self) -> "SummingHead | None":
        return SummingHead() if self._has_head else None


class SummingHead:
    """The prediction is wrong if the head's cache entries do not match the sum of the hidden state."""

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        own_sums, _ = sum_entries(input_ids, ctx, 1, 1)
        sums, firsts = hidden.unbind(1)
        sums = sums + input_ids * (positions + 2)
        return torch.stack((sums + (own_sums + firsts != sums), firsts), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return make_logits(hidden[:, 0])


def build_summing(error_interval: int | None, build: BuildContext) -> SummingLM:
    return SummingLM(error_interval, build)


def summing_spec(error_interval: int | None = None, draft: ModelSpec | None = None) -> ModelSpec:
    build = partial(build_summing, error_interval)
    return ModelSpec("summing", VOCAB, LONGEST, (5,), torch.float32, build, draft=draft)


def continue_sum(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(token * (position + 1) for position, token in enumerate(tokens)) % VOCAB)
    return tokens[len(prompt) :]
