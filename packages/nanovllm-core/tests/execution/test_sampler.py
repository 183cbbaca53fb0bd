"""What is looked up of a step's rows: only of whom it is needed, and the same whether compiled or not."""

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from nanovllm_core.execution.request_table import Needs, RequestTable
from nanovllm_core.execution.sampler import StepHandle, draw, gather, with_logprobs
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
