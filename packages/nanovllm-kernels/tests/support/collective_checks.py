"""Checks that run in every rank's process, on a CPU and on GPUs. A failed check raises AssertionError."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm_kernels import collective
from nanovllm_kernels.collective import Communicator
from nanovllm_kernels.elementwise import prepare_norm_weight

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5


@contextmanager
def open_communicator(device: torch.device) -> Iterator[Communicator]:
    communicator = Communicator(dist.group.WORLD, device)
    yield communicator
    communicator.close()


def make_parts(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Return random tensors, one for each rank. All ranks get the same list."""
    generator = torch.Generator(device).manual_seed(seed + sum(shape))
    return [_random(shape, dtype, generator) for _ in range(dist.get_world_size())]


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator, device=generator.device).to(dtype)
    info = torch.iinfo(torch.uint8 if dtype.itemsize == 1 else torch.int32)
    integers = torch.randint(info.min, info.max, shape, generator=generator, device=generator.device)
    integers.view(-1)[::3] = info.max if info.min == 0 else -1  # all bits set
    return integers.to(torch.uint8).view(dtype) if dtype.itemsize == 1 else integers.to(dtype)


def check_equal_on_all_ranks(x: Tensor) -> None:
    own = x.contiguous().view(-1).view(torch.uint8)
    gathered = own.new_empty(dist.get_world_size() * own.numel())
    dist.all_gather_into_tensor(gathered, own)
    for rank, other in enumerate(gathered.chunk(dist.get_world_size())):
        assert torch.equal(own, other), f"the tensor of rank {rank} differs from this rank's tensor"


def check_close(actual: Tensor, parts: list[Tensor], addend: Tensor | float = 0.0, num_roundings: int = 1) -> None:
    """Compare with `addend` plus the sum of `parts`. num_roundings: roundings to the dtype of `actual`."""
    exact = sum((part.double() for part in parts), torch.zeros((), dtype=torch.float64, device=actual.device)) + addend
    magnitude = sum(part.double().abs() for part in parts) + abs(addend)
    relative = torch.finfo(actual.dtype).eps / 2 * num_roundings + torch.finfo(torch.float32).eps * len(parts)
    excess = (actual.double() - exact).abs() - magnitude * relative
    assert excess.max() <= 0, f"error of {excess.max().item()} beyond the tolerance"


def check_sums(communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    parts = make_parts(shape, dtype, device)
    x = parts[communicator.rank].clone()
    assert communicator.all_reduce(x) is x
    if dtype.is_floating_point:
        check_close(x, parts, num_roundings=communicator.size)
    else:
        assert torch.equal(x, sum(parts).to(dtype))
    check_equal_on_all_ranks(x)
    wide_parts = make_parts((communicator.size * shape[0], *shape[1:]), dtype, device)
    own_sums = communicator.reduce_scatter(wide_parts[communicator.rank])
    own_parts = [part.chunk(communicator.size)[communicator.rank] for part in wide_parts]
    if dtype.is_floating_point:
        check_close(own_sums, own_parts, num_roundings=communicator.size)
    else:
        assert torch.equal(own_sums, sum(own_parts).to(dtype))


def check_copies(communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    parts = make_parts(shape, dtype, device)
    own = parts[communicator.rank]
    assert _same(communicator.all_gather(own), torch.cat([_view_fp8_as_bytes(part) for part in parts]))
    for source in (0, communicator.size - 1):
        x = own.clone()
        communicator.broadcast(x, source)
        assert _same(x, _view_fp8_as_bytes(parts[source]))
    columns = make_parts((communicator.size * shape[0], 0 if own.dim() < 2 else own[0].numel()), dtype, device)
    exchanged = communicator.exchange_columns(columns[communicator.rank])
    expected = torch.cat([_view_fp8_as_bytes(part).chunk(communicator.size)[communicator.rank] for part in columns], 1)
    assert _same(exchanged, expected)


def _view_fp8_as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _same(actual: Tensor, expected: Tensor) -> bool:
    return torch.equal(_view_fp8_as_bytes(actual), expected)


def check_norm(
    communicator: Communicator,
    num_rows: int,
    hidden_size: int,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype],
    device: torch.device,
) -> None:
    """dtypes: partial sums, residual (None: no residual), normed rows."""
    dtype, residual_dtype, normed_dtype = dtypes
    shape = (num_rows, hidden_size)
    parts = make_parts(shape, dtype, device)
    residual = None if residual_dtype is None else make_parts(shape, residual_dtype, device, seed=1)[0]
    weight = make_parts((hidden_size,), normed_dtype, device, seed=2)[0]
    partial = parts[communicator.rank].clone()
    addend = 0.0 if residual is None else residual.double()
    new_residual, normed = communicator.all_reduce_norm(
        partial, residual, prepare_norm_weight(weight), EPS, normed_dtype
    )
    assert new_residual is (partial if residual is None else residual)
    assert normed.dtype == normed_dtype
    # NCCL rounds sums to the dtype of the partial sums first.
    check_close(new_residual.to(dtype), parts, addend, num_roundings=communicator.size + 2)
    check_close_norm(normed, new_residual, weight)
    check_equal_on_all_ranks(new_residual)
    check_equal_on_all_ranks(normed)


def check_close_norm(normed: Tensor, x: Tensor, weight: Tensor) -> None:
    x = x.double()
    expected = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    tolerance = max(2 * torch.finfo(normed.dtype).eps, 5e-6)  # The GPU's rsqrt is approximate.
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=1e-6)


def check_nan_is_no_empty_slot(communicator: Communicator, device: torch.device) -> None:
    """NaNs with the bits of an empty slot must arrive as NaNs."""
    for dtype in FLOATS:
        x = torch.zeros((2, 128), device=device, dtype=dtype)
        x.view(torch.uint8)[0] = 0xFF
        for nans in (communicator.all_gather(x).isnan(), communicator.all_reduce(x).isnan()):
            assert nans[::2].all()
            assert not nans[1::2].any()


def check_different_offsets(communicator: Communicator, device: torch.device) -> None:
    """Ranks must choose the same kernel if only some of their tensors begin at a multiple of 4 bytes."""
    parts = make_parts((2, 64), torch.bfloat16, device)
    offset = communicator.rank % 2
    own = torch.zeros(offset + parts[0].numel(), dtype=torch.bfloat16, device=device)[offset:].view(2, 64)
    own.copy_(parts[communicator.rank])
    assert torch.equal(communicator.all_gather(own), torch.cat(parts))


def check_compiled(communicator: Communicator, device: torch.device, backend: str) -> None:
    weight = torch.ones(64, device=device, dtype=torch.bfloat16)

    def compute(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        new_residual, normed = communicator.all_reduce_norm(x * 2, residual + 1, weight, EPS, torch.bfloat16)
        gathered = communicator.all_gather(normed)
        scattered = communicator.reduce_scatter(gathered * 3)
        source_columns = scattered + 0
        communicator.broadcast(source_columns, 1)
        return new_residual, communicator.all_reduce(scattered * 1), communicator.exchange_columns(source_columns)

    x = make_parts((4 * communicator.size, 64), torch.bfloat16, device)[communicator.rank]
    residual = torch.ones_like(x)
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(compute, fullgraph=True, backend=backend)
    for actual, expected in zip(compiled(x, residual), compute(x, residual), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.05)


def check_empty(communicator: Communicator, device: torch.device) -> None:
    empty = torch.zeros((0, 16), device=device)
    assert communicator.all_reduce(empty).shape == (0, 16)
    new_residual, normed = communicator.all_reduce_norm(empty, None, torch.ones(16, device=device), EPS, torch.bfloat16)
    assert new_residual is empty
    assert (normed.shape, normed.dtype) == ((0, 16), torch.bfloat16)
    assert communicator.all_gather(empty).shape == communicator.reduce_scatter(empty).shape == (0, 16)
    assert communicator.exchange_columns(empty).shape == (0, 16 * communicator.size)
    communicator.broadcast(empty)


def check_schemas(communicator: Communicator, device: torch.device) -> None:
    name, x = dist.group.WORLD.group_name, torch.ones((2 * communicator.size, 16), device=device)
    arguments = {
        "all_reduce": (x, name),
        "all_reduce_norm": (x, x.clone(), x[0], EPS, torch.float32, name),
        "all_gather": (x, name),
        "reduce_scatter": (x, name),
        "exchange_columns": (x, name),
        "broadcast": (x, 0, name),
    }
    for operator, values in arguments.items():
        custom_op = vars(collective)[f"_{operator}_op"]
        torch.library.opcheck(custom_op, values, test_utils=("test_schema", "test_faketensor"))


def check_rejected_arguments(communicator: Communicator, device: torch.device) -> None:
    import pytest

    with pytest.raises(ValueError, match="has an open communicator"):
        Communicator(dist.group.WORLD, device)
    x = torch.zeros((4 * communicator.size, 8), device=device)
    with pytest.raises(ValueError, match="contiguous"):
        communicator.all_reduce(x.t())
    with pytest.raises(ValueError, match="can't sum torch.uint8"):
        communicator.all_reduce(x.to(torch.uint8))
    with pytest.raises(ValueError, match="can't be split evenly"):
        communicator.reduce_scatter(x[1:])
    with pytest.raises(ValueError, match="can't be split evenly"):
        communicator.exchange_columns(x[1:])
    with pytest.raises(ValueError, match="norm_weight has 7 elements, but partial has 8 columns"):
        communicator.all_reduce_norm(x, x, x[0, 1:], EPS, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        communicator.all_reduce_norm(x, x[1:], x[0], EPS, torch.float32)


def check_graph(communicator: Communicator, num_rows: int, hidden_size: int, device: torch.device) -> None:
    dtype, size = torch.bfloat16, communicator.size
    x = torch.zeros((size * num_rows, hidden_size), dtype=dtype, device=device)
    residual, tokens = torch.zeros_like(x), torch.zeros(num_rows, dtype=torch.int32, device=device)
    weight = torch.ones(hidden_size, dtype=dtype, device=device)

    def compute() -> tuple[Tensor, ...]:
        # `all_reduce_norm` and `all_reduce` overwrite their arguments.
        new_residual, normed = communicator.all_reduce_norm(x.clone(), residual.clone(), weight, EPS, dtype)
        sums = communicator.all_reduce(x[:num_rows].clone())
        scattered = communicator.reduce_scatter(x)
        return new_residual, normed, sums, scattered, communicator.all_gather(tokens), communicator.exchange_columns(x)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outputs = compute()
        for step in range(100):
            parts = make_parts(tuple(x.shape), dtype, device, seed=step)
            token_parts = make_parts((num_rows,), torch.int32, device, seed=step)
            x.copy_(parts[communicator.rank])
            residual.copy_(parts[0])
            tokens.copy_(token_parts[communicator.rank])
            if step % size == communicator.rank:
                torch.cuda._sleep(100_000)
            graph.replay()
            new_residual, normed, sums, scattered, gathered, exchanged = outputs
            check_close(new_residual, parts, parts[0].double(), num_roundings=size + 1)
            check_close_norm(normed, new_residual, weight)
            check_close(sums, [part[:num_rows] for part in parts], num_roundings=size)
            check_close(scattered, [part.chunk(size)[communicator.rank] for part in parts], num_roundings=size)
            assert torch.equal(gathered, torch.cat(token_parts))
            assert torch.equal(exchanged, torch.cat([part.chunk(size)[communicator.rank] for part in parts], 1))
            if step % 20 == 0:
                check_equal_on_all_ranks(normed)
                check_equal_on_all_ranks(sums)
            if step % 10 == 0:
                check_sums(communicator, (3, hidden_size), dtype, device)


def fail_on_last_rank(device: torch.device) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank fails")
    time.sleep(1000)


def sleep_on_all_ranks(device: torch.device) -> None:
    time.sleep(1000)


def check_on_cpu(device: torch.device) -> None:
    torch.set_grad_enabled(False)
    with open_communicator(device) as communicator:
        for dtype in (*FLOATS, torch.int32, torch.int64):
            check_sums(communicator, (3, 33), dtype, device)
            check_sums(communicator, (5,), dtype, device)
        for dtype in (*FLOATS, torch.int32, torch.uint8, torch.float8_e4m3fn):
            check_copies(communicator, (3, 7), dtype, device)
        for dtype in FLOATS:
            for residual_dtype in (None, dtype, torch.float32):
                check_norm(communicator, 5, 576, (dtype, residual_dtype, dtype), device)
        check_norm(communicator, 1, 64, (torch.bfloat16, torch.float32, torch.float32), device)
        check_empty(communicator, device)
        check_schemas(communicator, device)
        check_compiled(communicator, device, "aot_eager")
        check_rejected_arguments(communicator, device)
    with open_communicator(device) as communicator:
        check_sums(communicator, (1, 2), torch.float32, device)


# Numbers of rows that together use NCCL and every kernel that two ranks use.
GPU_ROWS = (1, 2, 7, 8, 64, 300, 4096)


def check_sums_on_gpus(device: torch.device) -> None:
    torch.set_grad_enabled(False)
    with open_communicator(device) as communicator:
        for dtype in FLOATS:
            for num_rows in GPU_ROWS:
                check_sums(communicator, (num_rows, 4096), dtype, device)
            for shape in ((1,), (3,), (5, 33), (2, 1_000_003)):
                check_sums(communicator, shape, dtype, device)
        check_sums(communicator, (3, 33), torch.int32, device)
        check_sums(communicator, (3, 33), torch.int64, device)
        check_nan_is_no_empty_slot(communicator, device)
        check_empty(communicator, device)
        check_compiled(communicator, device, "inductor")
        check_rejected_arguments(communicator, device)
    communicator = Communicator(dist.group.WORLD, device, use_peer_memory=False)
    check_sums(communicator, (3, 33), torch.bfloat16, device)
    check_norm(communicator, 3, 4096, (torch.bfloat16, torch.float32, torch.bfloat16), device)
    communicator.close()


def check_norms_on_gpus(device: torch.device) -> None:
    torch.set_grad_enabled(False)
    with open_communicator(device) as communicator:
        for num_rows in GPU_ROWS:
            for dtype in FLOATS:
                for residual_dtype in (None, dtype) if dtype == torch.float32 else (None, dtype, torch.float32):
                    check_norm(communicator, num_rows, 4096, (dtype, residual_dtype, dtype), device)
            for hidden_size in (8192, 3072, 2048):
                for residual_dtype in (torch.bfloat16, torch.float32):
                    dtypes = (torch.bfloat16, residual_dtype, torch.bfloat16)
                    check_norm(communicator, num_rows, hidden_size, dtypes, device)
        check_norm(communicator, 3, 576, (torch.bfloat16, torch.float32, torch.float32), device)
        check_norm(communicator, 3, 1001, (torch.bfloat16, torch.float32, torch.bfloat16), device)


def check_two_shots_on_gpus(device: torch.device) -> None:
    """Check the two-shot kernel and the norm without a sum. Two ranks choose them only with a one-shot limit of 0."""
    from nanovllm_kernels.collective import peer_collectives

    torch.set_grad_enabled(False)
    dtypes = (torch.bfloat16, torch.float32, torch.bfloat16)
    with (
        patch.object(peer_collectives, "choose_one_shot_limit", return_value=0),
        open_communicator(device) as communicator,
    ):
        for num_rows in GPU_ROWS:
            for dtype in FLOATS:
                check_sums(communicator, (num_rows, 4096), dtype, device)
            check_norm(communicator, num_rows, 4096, dtypes, device)
        check_graph(communicator, 7, 3072, device)


def check_copies_on_gpus(device: torch.device) -> None:
    torch.set_grad_enabled(False)
    with open_communicator(device) as communicator:
        for dtype in (*FLOATS, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn):
            for shape in ((1, 1), (1, 7), (3, 4), (8, 100), (64, 4096), (100, 3000), (300, 8192)):
                check_copies(communicator, shape, dtype, device)
        check_different_offsets(communicator, device)


def check_graphs_on_gpus(device: torch.device) -> None:
    torch.set_grad_enabled(False)
    with open_communicator(device) as communicator:
        for num_rows, hidden_size in ((1, 4096), (7, 3072), (64, 8192), (300, 8192)):
            check_graph(communicator, num_rows, hidden_size, device)
