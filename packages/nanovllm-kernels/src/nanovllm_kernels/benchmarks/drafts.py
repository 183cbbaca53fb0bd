"""Benchmark cases of speculative decoding: proposal of drafts by a search for n-grams, and verification of drafts.

The throughput of a proposal counts the bytes of all known tokens.
"""

from collections.abc import Callable, Iterator

import torch

from nanovllm_kernels.benchmarks.timing import BenchmarkCase
from nanovllm_kernels.request_tables import TokenTables, propose_ngrams, verify_drafts

# Drafts per request, and minimum and maximum number of tokens of an n-gram.
NUM_DRAFTS, MIN_MATCH, MAX_MATCH = 4, 3, 8
# Number of free places in a request's row after the known tokens, enough for the new tokens of all replays.
NUM_PLACES = 1024


def _make_tables(batch: int, context: int, num_token_ids: int) -> TokenTables:
    shape = (batch, context + NUM_PLACES)
    tokens = torch.randint(0, num_token_ids, shape, device="cuda", dtype=torch.int32)
    return TokenTables(tokens, torch.full((batch,), context - 1, device="cuda", dtype=torch.int32))


def _proposal_case(batch: int, context: int, num_token_ids: int) -> BenchmarkCase:
    """Make a case of `context` tokens per request, drawn from `num_token_ids` ids. With one id, all tokens match."""

    def make_call() -> Callable[[], object]:
        tables = _make_tables(batch, context, num_token_ids)
        rows = torch.randperm(batch, device="cuda").int()
        is_sampled = torch.ones_like(rows)
        return lambda: propose_ngrams(
            rows, is_sampled, tables, num_drafts=NUM_DRAFTS, min_match=MIN_MATCH, max_match=MAX_MATCH
        )

    name = f"propose drafts batch {batch} context {context}"
    if num_token_ids == 1:
        name += " equal"
    num_bytes = batch * context * 4
    return BenchmarkCase(name, make_call, num_bytes, "TB/s", num_bytes)


def _verification_case(batch: int) -> BenchmarkCase:
    """Make a case in which each request has NUM_DRAFTS drafts. About half of the drafts equal the sampled tokens."""
    query_len, context = 1 + NUM_DRAFTS, 8192

    def make_call() -> Callable[[], object]:
        tables = _make_tables(batch, context, 2)
        rows = torch.randperm(batch, device="cuda").int()
        starts = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * query_len
        sampled = torch.randint(0, 2, (batch * query_len,), device="cuda", dtype=torch.int32)
        return lambda: verify_drafts(rows, starts, sampled, tables, None)

    num_bytes = batch * (NUM_DRAFTS + query_len + 2) * 4
    return BenchmarkCase(f"verify drafts batch {batch}", make_call, num_bytes, "GB/s", batch * context * 4)


def draft_cases() -> Iterator[BenchmarkCase]:
    """Yield cases of proposals at several context lengths and batch sizes, and of verification."""
    for context in (1024, 8192, 131_072):
        for batch in (1, 8, 64, 512):
            yield _proposal_case(batch, context, 50_000)
    # The search takes longest if all tokens are equal.
    yield _proposal_case(64, 8192, 1)
    for batch in (1, 64, 512):
        yield _verification_case(batch)
