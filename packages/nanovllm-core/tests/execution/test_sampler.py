"""What is looked up of a step's rows: only of whom it is needed, and the same whether compiled or not."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nanovllm_core.execution.landing import Place
from nanovllm_core.execution.request_table import Needs, RequestTable
from nanovllm_core.execution.sampler import SCORED_AT_ONCE, StepHandle, draw, gather, score, with_logprobs
from nanovllm_core.layers import compiled

ROWS, VOCAB = 16, 40


@pytest.fixture
def table() -> RequestTable:
    table = RequestTable(ROWS, 32, 16, VOCAB, 1, torch.device("cpu"))
    table.temperature.copy_(torch.linspace(0.3, 2.0, ROWS))
    table.top_k.copy_(torch.arange(ROWS) % 5)
    table.top_p.fill_(0.9)
    table.seeds.copy_(torch.arange(ROWS) * 977)
    return table


def test_greedy_rows_are_not_looked_up(table):
    def refuse(rows, columns):
        raise AssertionError("nothing here is drawn")

    logits, rows = torch.randn(3, VOCAB), torch.tensor([4, 1, 2], dtype=torch.int32)
    found = draw(logits, rows, rows, table, Needs.NOTHING, refuse)
    assert found.tolist() == logits.argmax(-1).tolist()


def test_a_compiled_look_up_draws_the_same(table, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(compiled, "BACKEND", counter)
    fast = compiled.compiled(gather, least_rows=1)
    needs = Needs.RANDOM | Needs.FILTER
    # As many rows as the table has come first: that is chance, and nothing to rely on.
    for count in (ROWS, 1, 2, 9, 1, 5):
        logits, rows = torch.randn(count, VOCAB), torch.randperm(ROWS)[:count].int()
        expected = draw(logits, rows, rows, table, needs, gather)
        assert torch.equal(draw(logits, rows, rows, table, needs, fast), expected)
    assert counter.frame_count == 2


def test_only_who_asked_gets_log_probabilities():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)
    which, wanted = np.array([0, 1, 3, 4]), np.array([2, -1, 0, 3])
    found = StepHandle(with_logprobs(tokens, logits, which, wanted, 3), which, wanted, None).tokens()
    assert found.tokens.tolist() == [3, 1, 1, 5]
    expected = logits.log_softmax(-1)
    assert [index for index, _ in found.logprobs] == [0, 2, 3]
    for index, entry in found.logprobs:
        row = which[index]
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        values, ids = expected[row].topk(int(wanted[index]))
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


@pytest.mark.parametrize("count", [1, SCORED_AT_ONCE, 2 * SCORED_AT_ONCE + 3])
def test_a_prompt_is_scored_piece_by_piece(count):
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(count, 8, generator=generator), torch.randn(VOCAB, 8, generator=generator)
    tokens = torch.randint(0, VOCAB, (count,), generator=generator, dtype=torch.int32)
    most = 0

    def compute_logits(piece):
        nonlocal most
        most = max(most, len(piece))
        return piece @ head.t()

    nothing = np.zeros(0, np.int64)
    (found,) = StepHandle(None, nothing, nothing, None, scored=[score(hidden, tokens, 3, compute_logits)]).tokens()[3]
    assert most <= SCORED_AT_ONCE
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


def test_a_step_that_samples_nothing_ends_with_an_event_that_is_waited_for():
    nothing, end = np.zeros(0, np.int64), CountingEvent()
    tokens = torch.zeros(4, dtype=torch.int32)
    handle = StepHandle(None, nothing, nothing, Place(tokens, tokens.numpy(), CountingEvent(), end, None))
    assert end.num_records == 1
    assert not handle.ready
    handle.wait()
    assert end.num_waits == 1
    assert handle.tokens().tokens.size == 0
