"""Shared fixtures: batches whose unfilled cache slots hold NaN, and reference loops in float64."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nanovllm_kernels import fp8
from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, DeltaWeights, StateBatch, plan_states


@dataclass(frozen=True)
class PagedBatch:
    q: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    scale: float
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    kv_scales: Tensor | None = None


def make_batch(
    lengths: Sequence[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> PagedBatch:
    """Make requests of (query_len, seq_len). Unfilled slots hold NaN. `num_decodes` counts only the leading decodes."""
    generator = torch.Generator().manual_seed(len(lengths) + head_dim)
    page_counts = [-(-seq_len // page_size) for _, seq_len in lengths]
    num_blocks = sum(page_counts) + 3
    free_ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = torch.randint(0, num_blocks, (len(lengths), max(page_counts) + 2), generator=generator, dtype=torch.int32)
    kv = torch.full((num_blocks * page_size, 2 * num_kv_heads, head_dim), math.nan)
    for request, (_, seq_len) in enumerate(lengths):
        blocks = torch.tensor([free_ids.pop() for _ in range(page_counts[request])], dtype=torch.long)
        tables[request, : len(blocks)] = blocks
        slots = (blocks[:, None] * page_size + torch.arange(page_size)).flatten()[:seq_len]
        kv[slots] = torch.randn((seq_len, *kv.shape[1:]), generator=generator)
    query_lens = torch.tensor([query_len for query_len, _ in lengths])
    starts = torch.cat((torch.zeros(1, dtype=torch.long), query_lens.cumsum(0)))
    return PagedBatch(
        q=torch.randn((int(starts[-1]), num_heads, head_dim), generator=generator).to(device, dtype),
        kv_cache=kv.view(num_blocks, page_size, *kv.shape[1:]).to(device, dtype),
        block_tables=tables.to(device),
        seq_lens=torch.tensor([seq_len for _, seq_len in lengths], dtype=torch.int32, device=device),
        query_start_loc=starts.to(device, torch.int32),
        scale=head_dim**-0.5,
        num_decodes=next((i for i, (query_len, _) in enumerate(lengths) if query_len > 1), len(lengths)),
        max_query_len=max(query_len for query_len, _ in lengths),
        max_seq_len=max(seq_len for _, seq_len in lengths),
    )


def rescale_and_quantize(batch: PagedBatch) -> PagedBatch:
    """Unfilled slots get infinite scales."""
    num_pages, page_size, num_cached_heads, _ = batch.kv_cache.shape
    generator = torch.Generator().manual_seed(num_pages)
    log2_factors = torch.rand((num_pages, page_size, num_cached_heads), generator=generator)
    log2_factors[..., num_cached_heads // 2 :] *= -15
    kv = batch.kv_cache.float() * log2_factors.to(batch.q.device).exp2().unsqueeze(-1)
    fp8_values, exponents = fp8.quantize(kv)
    exponents[kv.isnan().any(-1)] = 255
    return replace(batch, kv_cache=fp8_values, kv_scales=exponents.transpose(1, 2).contiguous())


def attend_naively(batch: PagedBatch) -> Tensor:
    """Returns float64 [T, Hq, D]."""
    outs = []
    page_size, num_kv_heads = batch.kv_cache.shape[1], batch.kv_cache.shape[2] // 2
    group_size = batch.q.shape[1] // num_kv_heads
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        positions = torch.arange(seq_len, device=batch.q.device)
        blocks = batch.block_tables[request, positions // page_size].long()
        kv = batch.kv_cache[blocks, positions % page_size].double()
        if batch.kv_scales is not None:
            exponents = batch.kv_scales[blocks, :, positions % page_size].double() - fp8.EXPONENT_BIAS
            kv = kv * exponents.exp2().unsqueeze(-1)
        kv = kv.repeat_interleave(group_size, 1)
        k, v = kv.chunk(2, 1)
        q = batch.q[starts[request] : starts[request + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * batch.scale
        is_visible = positions <= (seq_len - q.shape[0] + torch.arange(q.shape[0], device=q.device))[:, None]
        weights = scores.masked_fill(~is_visible, -math.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs)


@dataclass(frozen=True)
class LatentBatch(PagedBatch):
    """Each cached row is a latent and the rotated part of a key."""

    expansion: Tensor | None = None


def make_latent_batch(
    lengths: Sequence[tuple[int, int]],
    shape: tuple[int, int, int, int, int],
    *,
    page_size: int,
    dtype: torch.dtype,
    device: str = "cpu",
) -> LatentBatch:
    """Like `make_batch`. shape: (heads, key size, value size, latent size, rotated size)."""
    num_heads, key_dim, value_dim, latent_dim, rope_dim = shape
    paged = make_batch(
        lengths,
        num_heads=1,
        num_kv_heads=1,
        head_dim=latent_dim + rope_dim,
        page_size=page_size,
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(num_heads)
    q = torch.randn((paged.q.shape[0], num_heads, key_dim + rope_dim), generator=generator)
    expansion = torch.randn((num_heads, key_dim + value_dim, latent_dim), generator=generator) * latent_dim**-0.5
    fields = vars(paged) | {
        "q": q.to(device, dtype),
        "kv_cache": paged.kv_cache[:, :, :1].contiguous(),
        "scale": (key_dim + rope_dim) ** -0.5,
        "expansion": expansion.to(device, dtype),
    }
    return LatentBatch(**fields)


def rescale_and_quantize_latents(batch: LatentBatch) -> LatentBatch:
    """Unfilled slots get infinite scales."""
    num_pages, page_size, _, _ = batch.kv_cache.shape
    log2_factors = torch.rand((num_pages, page_size, 1), generator=torch.Generator().manual_seed(num_pages)) * -6
    kv = batch.kv_cache.float() * log2_factors.to(batch.q.device).exp2().unsqueeze(-1)
    fp8_values, exponents = fp8.quantize(kv)
    exponents[kv.isnan().any(-1)] = 255
    return replace(batch, kv_cache=fp8_values, kv_scales=exponents.transpose(1, 2).contiguous())


def attend_latents_naively(batch: LatentBatch) -> Tensor:
    """Returns float64 [T, H, V]."""
    outs = []
    page_size, latent_dim = batch.kv_cache.shape[1], batch.expansion.shape[2]
    key_dim = batch.q.shape[2] - (batch.kv_cache.shape[3] - latent_dim)
    starts, lengths = batch.query_start_loc.tolist(), batch.seq_lens.tolist()
    for request, seq_len in enumerate(lengths):
        positions = torch.arange(seq_len, device=batch.q.device)
        blocks = batch.block_tables[request, positions // page_size].long()
        cached = batch.kv_cache[blocks, positions % page_size, 0].double()
        if batch.kv_scales is not None:
            exponents = batch.kv_scales[blocks, 0, positions % page_size].double() - fp8.EXPONENT_BIAS
            cached = cached * exponents.exp2().unsqueeze(-1)
        kv = torch.einsum("kl,hdl->khd", cached[:, :latent_dim], batch.expansion.double())
        k, v = kv[..., :key_dim], kv[..., key_dim:]
        q = batch.q[starts[request] : starts[request + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", q[..., :key_dim], k)
        scores = (scores + torch.einsum("qhd,kd->hqk", q[..., key_dim:], cached[:, latent_dim:])) * batch.scale
        is_visible = positions <= (seq_len - q.shape[0] + torch.arange(q.shape[0], device=q.device))[:, None]
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~is_visible, -math.inf).softmax(-1), v))
    return torch.cat(outs)


@pytest.fixture
def latent_batch() -> Callable[..., LatentBatch]:
    return make_latent_batch


@pytest.fixture
def quantized_latents() -> Callable[[LatentBatch], LatentBatch]:
    return rescale_and_quantize_latents


@pytest.fixture
def naive_latent_attention() -> Callable[[LatentBatch], Tensor]:
    return attend_latents_naively


@dataclass(frozen=True)
class StateCase:
    """The arguments of one `gated_delta_net` step. checkpoints: (position, slot) pairs of each request."""

    qkvz: Tensor
    ba: Tensor
    weights: DeltaWeights
    recurrent: Tensor
    conv: Tensor
    counts_and_lengths: Sequence[tuple[int, int]]
    slots: Sequence[int]
    checkpoints: Sequence[Sequence[tuple[int, int]]]

    def plan(self, backend: str, *, knows_decodes: bool = True) -> StateBatch:
        counts = [count for count, _ in self.counts_and_lengths]
        pairs = [[*pairs, (0, 0), (0, 0)][:2] for pairs in self.checkpoints]
        device = self.qkvz.device
        return plan_states(
            torch.tensor(self.slots, dtype=torch.int32, device=device),
            torch.tensor(pairs, dtype=torch.int32, device=device),
            torch.tensor([length for _, length in self.counts_and_lengths], dtype=torch.int32, device=device),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device),
            num_decodes=counts.count(1) if knows_decodes else None,
            max_query_len=max(counts),
            num_tokens=len(self.qkvz),
            backend=backend,
        )


def make_states(
    counts_and_lengths: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (16, 16),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> StateCase:
    """Make requests of (query_len, seq_len), with up to two checkpoints each. Unfilled slots hold NaN."""
    (num_k_heads, num_v_heads), (k_dim, v_dim) = heads, dims
    generator = torch.Generator().manual_seed(sum(map(sum, counts_and_lengths)) + k_dim)
    num_tokens, num_state_slots = sum(count for count, _ in counts_and_lengths), 3 * len(counts_and_lengths) + 2
    channels = 2 * num_k_heads * k_dim + num_v_heads * v_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    free_ids = (torch.randperm(num_state_slots - 1, generator=generator) + 1).tolist()
    slots = [free_ids.pop() for _ in counts_and_lengths]
    recurrent = torch.full((num_state_slots, num_v_heads, v_dim, k_dim), torch.nan)
    conv = torch.full((num_state_slots, width, channels), torch.nan)
    checkpoints = []
    for slot, (count, length) in zip(slots, counts_and_lengths, strict=True):
        num_computed = length - count
        if num_computed:
            recurrent[slot] = random(*recurrent.shape[1:]) * 0.3
            filled_positions = torch.arange(max(0, num_computed - width + 1), num_computed) % width
            conv[slot, filled_positions] = random(len(filled_positions), channels)
        checkpoint_positions = range(
            (num_computed // CHECKPOINT_INTERVAL + 1) * CHECKPOINT_INTERVAL, length + 1, CHECKPOINT_INTERVAL
        )
        checkpoints.append([(position, free_ids.pop()) for position in checkpoint_positions][-2:])
    weights = DeltaWeights(
        conv=random(width, channels) * 0.5,
        decay_rate=torch.rand(num_v_heads, generator=generator) * 2 + 0.01,
        dt_bias=random(num_v_heads),
        norm=random(v_dim).abs() + 0.1,
        eps=1e-6,
    )
    # Views of wider rows, like the results of a joint projection.
    wide = random(num_tokens, channels + num_v_heads * v_dim + 2 * num_v_heads + 3).to(device, dtype)
    return StateCase(
        wide[:, : channels + num_v_heads * v_dim],
        wide[:, channels + num_v_heads * v_dim : -3],
        DeltaWeights(*(part.to(device) for part in weights[:4]), weights.eps),
        recurrent.to(device, state_dtype),
        conv.to(device, dtype),
        counts_and_lengths,
        slots,
        checkpoints,
    )


@pytest.fixture
def state_case() -> Callable[..., StateCase]:
    return make_states


@pytest.fixture
def paged_batch() -> Callable[..., PagedBatch]:
    return make_batch


@pytest.fixture
def quantized() -> Callable[[PagedBatch], PagedBatch]:
    return rescale_and_quantize


@pytest.fixture
def naive_attention() -> Callable[[PagedBatch], Tensor]:
    return attend_naively


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["as probed", "without bf16 units"])
def bf16_units(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "without bf16 units":
        monkeypatch.setattr("nanovllm_kernels.platform.prefers_packed_bf16", lambda: False)
        monkeypatch.setattr("nanovllm_kernels.gemm.prefers_packed_bf16", lambda: False)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised tensors with NaN (integers: the largest value), so that tests notice unwritten elements."""
    if torch.cuda.is_available():
        # Deterministic mode rejects CUDA operators that the reference loops use.
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
