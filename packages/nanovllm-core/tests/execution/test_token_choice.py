import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nanovllm_core.execution.host_copy import HostCopySlot
from nanovllm_core.execution.inputs import DeviceRows, Masks
from nanovllm_core.execution.prompt_scores import SCORE_CHUNK_TOKENS, score_prompt_tokens
from nanovllm_core.execution.request_table import RequestTable, SamplingOps, StepInputs
from nanovllm_core.execution.step_handle import ChosenTokens, StepHandle
from nanovllm_core.execution.token_choice import CAPTURED_OP_SETS, choose_tokens, compute_logprobs, gather_columns
from nanovllm_core.layers import compilation
from nanovllm_core.parallel import ParallelContext
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids
from nanovllm_kernels.sampling import IN_PROMPT_BIT

ROWS, VOCAB = 16, 40


@pytest.fixture
def table() -> RequestTable:
    table = RequestTable(ROWS, 32, 16, VOCAB, 1, torch.device("cpu"))
    table.temperature.copy_(torch.linspace(0.3, 2.0, ROWS))
    table.top_k.copy_(torch.arange(ROWS) % 5)
    table.top_p.fill_(0.9)
    table.seeds.copy_(torch.arange(ROWS) * 977)
    return table


def test_greedy_step_gathers_no_settings(table):
    def refuse_gather(rows, columns):
        raise AssertionError("settings are gathered for a greedy step")

    logits, rows = torch.randn(3, VOCAB), torch.tensor([4, 1, 2], dtype=torch.int32)
    found = choose_tokens(logits, rows, rows, table, SamplingOps.GREEDY, refuse_gather)
    assert found.tolist() == logits.argmax(-1).tolist()


def test_compiled_gather_gives_the_same_tokens(table, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compilation, "BACKEND", counter)
    compiled_gather = compilation.compile_for_rows(gather_columns, min_rows=1)
    ops = SamplingOps.RANDOM | SamplingOps.FILTER
    for count in (ROWS, 1, 2, 9, 1, 5):
        logits, rows = torch.randn(count, VOCAB), torch.randperm(ROWS)[:count].int()
        expected = choose_tokens(logits, rows, rows, table, ops, gather_columns)
        assert torch.equal(choose_tokens(logits, rows, rows, table, ops, compiled_gather), expected)
    assert counter.frame_count == 2


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {3: 50.0, 9: -5.0}},
    {"temperature": 1.0, "logit_bias": {3: -50.0}},
    {"temperature": 0.0, "forbidden_sequences": ((1,), (2,), (7, 8))},
    {
        "temperature": 0.9,
        "top_k": 9,
        "repetition_penalty": 0.8,
        "forbidden_sequences": ((4, 5, 6),),
        "logit_bias": {1: 1.0},
    },
]


def assign_rows(table: RequestTable, options: list[dict]) -> list[int]:
    """Give each row of `table` a new request, and return the `SamplingOps` of each row."""
    rng = np.random.default_rng(len(options))
    new_rows = [
        NewRow(
            row, as_token_ids(rng.integers(0, 12, 9)), 5, 8, SamplingParams(**row_options), seed=row * 31, stop_ids=()
        )
        for row, row_options in enumerate(options)
    ]
    count = len(options)
    scheduled = ScheduledRows(np.arange(count), np.ones(count, np.int64), np.ones(count, np.bool_))
    table.apply_plan(StepPlan(0, new_rows, NewBlocks(), scheduled, BatchShape(count, count, 1), max_seq_len=9))
    return [int(ops) for ops in table._ops]


@pytest.mark.parametrize("seed", range(20))
def test_operations_of_other_rows_do_not_change_tokens(seed):
    rng = np.random.default_rng(seed)
    table = RequestTable(ROWS, 32, 16, VOCAB, 1, torch.device("cpu"))
    # Assign the rows three times: entries of earlier requests must not affect later requests.
    for _ in range(3):
        ops_by_row = assign_rows(table, [OPTIONS[index] for index in rng.integers(0, len(OPTIONS), ROWS)])
        generator = torch.Generator().manual_seed(seed)
        logits, rows = torch.randn(ROWS, VOCAB, generator=generator), torch.randperm(ROWS, generator=generator).int()
        positions = torch.full((ROWS,), 9, dtype=torch.int32)
        masked = torch.rand(ROWS, generator=generator) < 0.3
        sample_indices = torch.where(masked, torch.arange(ROWS), -1).int()
        bits = torch.randint(1, 2**31, (ROWS, 2), generator=generator).int()
        before = logits.clone()
        found = choose_tokens(
            logits, rows, positions, table, CAPTURED_OP_SETS[-1], gather_columns, Masks(sample_indices, bits)
        )
        assert torch.equal(logits, before)
        for index in range(ROWS):
            row_ops = ops_by_row[rows[index]] | (int(SamplingOps.MASK) if masked[index] else 0)
            assert not row_ops & ~CAPTURED_OP_SETS[-1]
            mask = Masks(torch.zeros(1, dtype=torch.int32), bits[index : index + 1]) if masked[index] else None
            single_row = slice(index, index + 1)
            alone = choose_tokens(
                logits[single_row], rows[single_row], positions[single_row], table, row_ops, gather_columns, mask
            )
            assert alone.tolist() == found[single_row].tolist(), OPTIONS
        # A captured sampling graph counts the tokens of all rows, also of rows without penalties.
        table.token_counts[rows.long(), found.long()] += 1


def test_counts_of_a_new_request_do_not_include_earlier_requests():
    table = RequestTable(2, 32, 16, VOCAB, 1, torch.device("cpu"))
    table.token_counts.random_(-(2**31), 2**31)
    assign_rows(table, [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 1.5}])
    counts = table.token_counts[1]
    prompt, output = table.tokens[1, :5].tolist(), table.tokens[1, 5:9].tolist()
    for token in range(VOCAB):
        assert int(counts[token]) == output.count(token) + (IN_PROMPT_BIT if token in prompt else 0)


def make_inputs(num_rows: int, sampling_indices: list[int], num_logprobs: list[int]) -> StepInputs:
    rows = DeviceRows(torch.arange(num_rows), torch.arange(num_rows + 1), torch.ones(num_rows))
    max_num_logprobs = max(num_logprobs, default=-1)
    query_lens, indices = np.ones(len(rows.table_rows), np.int64), np.array(sampling_indices, np.int64)
    return StepInputs(rows, query_lens, indices, 0, np.array(num_logprobs, np.int64), max_num_logprobs)


def test_only_rows_that_asked_get_log_probabilities():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)
    sampling_indices, num_logprobs = np.array([0, 1, 3, 4]), np.array([2, -1, 0, 3])
    step = make_inputs(5, sampling_indices, num_logprobs)
    logprobs = compute_logprobs(tokens, logits, step, ParallelContext())
    found = StepHandle(step, ChosenTokens(tokens), logprobs, None).read_results()
    assert found.tokens.tolist() == [3, 1, 1, 5]
    expected = logits.log_softmax(-1)
    assert [index for index, _ in found.logprobs] == [0, 2, 3]
    for index, entry in found.logprobs:
        row = sampling_indices[index]
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        values, ids = expected[row].topk(int(num_logprobs[index]))
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("count", [1, SCORE_CHUNK_TOKENS, 2 * SCORE_CHUNK_TOKENS + 3])
def test_prompt_is_scored_in_chunks(count):
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(count, 8, generator=generator), torch.randn(VOCAB, 8, generator=generator)
    tokens = torch.randint(0, VOCAB, (count,), generator=generator, dtype=torch.int32)
    max_chunk_len = 0

    def compute_logits(chunk):
        nonlocal max_chunk_len
        max_chunk_len = max(max_chunk_len, len(chunk))
        return chunk @ head.t()

    scores = score_prompt_tokens(hidden, tokens, 3, compute_logits, ParallelContext())
    handle = StepHandle(make_inputs(0, [], []), ChosenTokens(), None, None, prompt_scores=[scores])
    (found,) = handle.read_results().prompt_logprobs
    assert max_chunk_len <= SCORE_CHUNK_TOKENS
    assert (len(found), found.num_top) == (count, 3)
    expected = (hidden @ head.t()).log_softmax(-1)
    for row, token, entry in zip(expected, tokens.tolist(), found, strict=True):
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-5)
        assert entry.rank == int((row >= row[token]).sum())
        values, ids = row.topk(3)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


class CountingEvent:
    def __init__(self):
        self.num_records = self.num_waits = 0

    def record(self, stream):
        self.num_records += 1

    def synchronize(self):
        self.num_waits += 1

    def query(self):
        return False


def test_step_without_sampling_records_an_event_at_its_end():
    end, tokens = CountingEvent(), torch.zeros(4, dtype=torch.int32)
    host_slot = HostCopySlot(tokens, tokens.numpy(), CountingEvent(), end, None)
    handle = StepHandle(make_inputs(0, [], []), ChosenTokens(), None, host_slot)
    assert end.num_records == 1
    assert not handle.is_finished
    handle.wait()
    assert end.num_waits == 1
    assert handle.read_results().tokens.size == 0
