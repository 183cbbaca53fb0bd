from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
import toy_model
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm_core.config import EngineConfig
from nanovllm_core.config_resolution import resolve
from nanovllm_core.errors import ConfigError
from nanovllm_core.execution import graphs as graphs_module
from nanovllm_core.execution.forward import ForwardOutput
from nanovllm_core.execution.graphs import (
    CapturedStep,
    GraphShape,
    StepGraphs,
    decode_sizes,
    graph_shapes,
    prompt_step_sizes,
)
from nanovllm_core.execution.model_proposers import DraftModelProposer, HeadProposer
from nanovllm_core.execution.proposers import NO_DRAFTS, NgramProposer
from nanovllm_core.execution.request_table import SamplingOps
from nanovllm_core.execution.runner import start_runner
from nanovllm_core.execution.token_choice import CAPTURED_OP_SETS, select_graph
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, NewRow, ScheduledRows, StepPlan
from nanovllm_core.token_ids import as_token_ids


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 16, 100, 256, 1000])
def test_decodes_are_padded_by_few_requests(max_num_seqs):
    sizes = decode_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_num_seqs
    for count in range(1, max_num_seqs + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count < max(8, count / 3)
    assert len(sizes) < 50


def test_neighbouring_prompt_step_sizes_differ_by_at_most_256_or_a_quarter():
    sizes = prompt_step_sizes(8192)
    assert sizes[0] == graphs_module.MIN_PROMPT_STEP_TOKENS
    assert sizes[-1] == 8192
    assert all(
        after - before <= min(before, max(graphs_module.MAX_SIZE_INCREMENT, before / 4))
        for before, after in pairwise(sizes)
    )
    assert len(sizes) < 25
    assert prompt_step_sizes(700) == [64, 128, 256, 512, 700]
    assert prompt_step_sizes(50) == [50]


def test_shapes_come_largest_first_and_fit_the_token_budget():
    shapes = graph_shapes("full", 64, 800)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    prompt_shapes = {shape.num_tokens: shape.mode for shape in shapes if shape.mode != "full_decode_only"}
    assert prompt_shapes == dict.fromkeys((64, 128, 256, 512, 768, 800), "full")
    assert {shape.mode for shape in graph_shapes("piecewise", 64, 800) if shape.max_query_len > 1} == {"piecewise"}
    assert {shape.max_query_len for shape in graph_shapes("full_decode_only", 64, 800)} == {1}
    assert graph_shapes("none", 64, 800) == []


def test_steps_of_many_tokens_also_have_shapes_with_few_requests():
    few, many_tokens = graphs_module.NUM_FEW_REQUESTS, graphs_module.MIN_FEW_REQUEST_TOKENS
    shapes = [shape for shape in graph_shapes("full", 64, 2 * many_tokens) if shape.max_query_len > 1]
    sizes = prompt_step_sizes(2 * many_tokens)
    assert {shape.num_tokens for shape in shapes if shape.num_reqs == 64} == set(sizes)
    assert {shape.num_tokens for shape in shapes if shape.num_reqs != 64} == {
        size for size in sizes if size >= many_tokens
    }
    assert {shape.num_reqs for shape in graph_shapes("full", few, 2 * many_tokens) if shape.max_query_len > 1} == {few}
    graphs = StepGraphs(shapes)
    graphs._steps = {shape: shape for shape in shapes}
    assert dispatch(graphs, few, many_tokens, None) == (few, many_tokens, many_tokens, "full", False, False)
    assert dispatch(graphs, few + 1, many_tokens, None) == (64, many_tokens, many_tokens, "full", False, False)
    assert dispatch(graphs, few, many_tokens // 2, None) == (
        64,
        many_tokens // 2,
        many_tokens // 2,
        "full",
        False,
        False,
    )


def test_steps_of_few_whole_prompts_have_separate_shapes():
    few = graphs_module.NUM_FEW_REQUESTS
    shapes = graph_shapes("full", 64, 1024, min_whole_prompt_tokens=512)
    whole_shapes = {shape[:2] for shape in shapes if shape.has_only_whole_prompts}
    assert whole_shapes == {(few, size) for size in prompt_step_sizes(1024) if size >= 512}
    assert not any(
        shape.has_only_whole_prompts for shape in graph_shapes("piecewise", 64, 1024, min_whole_prompt_tokens=512)
    )
    graphs = StepGraphs(shapes)
    graphs._steps = {shape: shape for shape in shapes}
    assert dispatch(graphs, few, 500, None, True) == (few, 512, 512, "full", True, False)
    assert dispatch(graphs, few, 500, None, False) == (few, 512, 512, "full", False, False)
    assert dispatch(graphs, few + 1, 500, None, True) == (64, 512, 512, "full", False, False)
    assert dispatch(graphs, few, 250, None, True) == (few, 256, 256, "full", False, False)


def test_decodes_with_drafts_have_separate_shapes():
    shapes = graph_shapes("full_decode_only", 16, 40, max_drafts=4, max_draft_step_tokens=24)
    assert {shape for shape in shapes if shape.has_drafts} == {
        GraphShape(min(size, 16), size, 5, "full_decode_only", has_drafts=True) for size in (2, 4, 5, 8, 16, 24)
    }
    assert {shape.num_reqs for shape in shapes if not shape.has_drafts} == {1, 2, 4, 8, 16}
    shapes = graph_shapes("full_decode_only", 16, 4, max_drafts=4, max_draft_step_tokens=4)
    assert max(shape.num_tokens for shape in shapes) == 4


def test_shapes_for_proposals_of_a_model_have_few_padded_requests():
    shapes = graph_shapes("full_decode_only", 16, 40, 4, 40, proposes_with_model=True)
    graphs = StepGraphs(shapes)
    graphs._steps = {shape: shape for shape in shapes}
    batches = [(1, 5), (2, 5), (2, 8), (8, 40), (9, 40)]
    padded = [dispatch(graphs, num_reqs, num_tokens, None, False, True)[:2] for num_reqs, num_tokens in batches]
    assert padded == [(1, 5), (5, 5), (2, 8), (8, 40), (16, 40)]


class AllCapturedGraphs(StepGraphs):
    """Claims that every shape is captured. `dispatch` returns the shape in place of its captured step."""

    def __init__(self, mode, budget=256, max_drafts=0):
        super().__init__(graph_shapes(mode, 16, budget, max_drafts=max_drafts, max_draft_step_tokens=40))
        self._steps = {shape: shape for shape in self._shapes}


def dispatch(graphs: StepGraphs, *batch) -> GraphShape | CapturedStep | None:
    return graphs.dispatch(BatchShape(*batch))


def test_dispatch_selects_the_smallest_shape_that_fits():
    graphs = AllCapturedGraphs("full", 1024)
    assert dispatch(graphs, 3, 3, 1) == GraphShape(4, 4, 1, "full_decode_only")
    assert dispatch(graphs, 16, 16, 1) == GraphShape(16, 16, 1, "full_decode_only")
    assert dispatch(graphs, 3, 50, None) == GraphShape(16, 64, 64, "full")
    assert dispatch(graphs, 2, 130, 65) == GraphShape(16, 256, 256, "full")
    assert dispatch(graphs, 2, 513, None) == GraphShape(16, 768, 768, "full")
    assert dispatch(graphs, 2, 1025, None) is None
    assert graphs.num_steps == {
        ("full_decode_only", "decode"): 2,
        ("full", "prompt"): 3,
        ("none", "prompt"): 1,
    }


def test_decode_with_drafts_is_dispatched_to_its_own_shape():
    graphs = AllCapturedGraphs("full", max_drafts=3)
    assert dispatch(graphs, 1, 4, None, False, True) == GraphShape(4, 4, 4, "full_decode_only", has_drafts=True)
    assert dispatch(graphs, 3, 9, None, False, True) == GraphShape(16, 16, 4, "full_decode_only", has_drafts=True)
    assert dispatch(graphs, 10, 41, None, False, True) is None
    assert dispatch(graphs, 3, 3, 1) == GraphShape(4, 4, 1, "full_decode_only")
    # Prompts of equal lengths do not count as drafts.
    assert dispatch(graphs, 3, 12, 4) == GraphShape(16, 64, 64, "full")
    assert graphs.num_steps == {
        ("full_decode_only", "draft"): 2,
        ("none", "draft"): 1,
        ("full_decode_only", "decode"): 1,
        ("full", "prompt"): 1,
    }


def test_step_with_a_prompt_has_no_graph_if_only_decodes_are_captured():
    graphs = AllCapturedGraphs("full_decode_only")
    assert dispatch(graphs, 3, 50, None) is None
    assert dispatch(graphs, 1, 1, 1) == GraphShape(1, 1, 1, "full_decode_only")
    assert dispatch(AllCapturedGraphs("none"), 1, 1, 1) is None


class RecordedGraph(TorchDispatchMode):
    """Stands in for a CUDA graph: a replay writes results to the tensors of the capture."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def capture_begin(self, **_):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.calls.append((operator, args, kwargs or {}, result))
        return result

    def replay(self):
        for operator, args, kwargs, result in self.calls:
            new_result = operator(*args, **kwargs)
            if new_result.data_ptr() != result.data_ptr():
                result.copy_(new_result)


def test_replayed_pieces_and_attention_equal_the_captured_forward_pass(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", RecordedGraph)
    monkeypatch.setattr(graphs_module, "_alias", lambda tensor: tensor)
    inputs, lengths, tables = torch.ones(8, 2), torch.tensor([3, 2]), torch.zeros(2, 4)

    def attention(layer):
        return lambda q, batch: q * batch + layer

    def forward(launch):
        hidden = inputs * 2
        for layer in range(3):
            hidden = hidden + launch(attention(layer), hidden - 1)
        return ForwardOutput(hidden, lengths, lengths, lengths, tables)

    with graphs_module._Capture(None) as capture:
        output = forward(capture.launch_attention)
    step = CapturedStep(capture.pieces, capture.attentions, output)
    assert len(step.pieces) == 4
    for num_tokens, factor in [(5, 3.0), (8, 2.0)]:
        inputs.copy_(torch.randn(8, 2))
        batch = torch.full((num_tokens, 2), factor)
        step.replay(num_tokens, lambda replayed, batch=batch: batch if replayed is output else None)
        expected = inputs[:num_tokens] * 2
        for layer in range(3):
            expected = expected + attention(layer)(expected - 1, batch)
        torch.testing.assert_close(output.logits[:num_tokens], expected)


def test_selected_sampling_graph_is_the_first_that_does_all_operations():
    graphs, all_ops = dict.fromkeys(CAPTURED_OP_SETS), CAPTURED_OP_SETS[-1]
    assert len(graphs) == 7
    for ops in CAPTURED_OP_SETS:
        assert select_graph(graphs, ops) == ops
    for ops in range(all_ops + 1):
        selected = select_graph(graphs, ops)
        assert not ops & ~selected
        assert selected == all_ops or not ops & (SamplingOps.PENALTY | SamplingOps.BIAS | SamplingOps.FORBID)
    assert select_graph(graphs, SamplingOps.FILTER) == SamplingOps.RANDOM | SamplingOps.FILTER


@pytest.mark.parametrize("proposer", [NgramProposer, HeadProposer, DraftModelProposer])
def test_captured_proposals_serve_steps_with_and_without_drafts(proposer):
    all_ops = range(CAPTURED_OP_SETS[-1] + 1)
    graphs = dict.fromkeys(proposer.captured_ops(None, may_propose=True))
    assert select_graph(graphs, NO_DRAFTS) == NO_DRAFTS
    assert all(select_graph(graphs, ops) != NO_DRAFTS for ops in all_ops)
    graphs = dict.fromkeys(proposer.captured_ops(None, may_propose=False))
    assert select_graph(graphs, NO_DRAFTS) == NO_DRAFTS
    # N-gram proposals take no time, so their graphs are captured although `may_propose` is False.
    assert proposer.uses_cache or all(select_graph(graphs, ops) != NO_DRAFTS for ops in all_ops)


def test_operations_without_a_graph_are_an_error():
    with pytest.raises(LookupError, match="no graph does the operations 4"):
        select_graph({int(SamplingOps.RANDOM): None}, SamplingOps.PENALTY)


def test_graph_mode_is_none_on_a_cpu_and_full_by_default_on_a_gpu():
    facts = {"max_position": 64, "model_dtype": torch.float32}
    assert resolve(EngineConfig(device="cpu"), has_cuda=True, **facts).graph_mode == "none"
    assert resolve(EngineConfig(), has_cuda=True, **facts).graph_mode == "full"
    assert resolve(EngineConfig(graph_mode="none"), has_cuda=True, **facts).graph_mode == "none"
    with pytest.raises(ConfigError, match="graph_mode 'full' needs a GPU"):
        resolve(EngineConfig(device="cpu", graph_mode="full"), has_cuda=True, **facts)


def test_torch_compile_is_on_by_default_only_on_a_gpu():
    facts = {"max_position": 64, "model_dtype": torch.float32, "has_cuda": True}
    assert resolve(EngineConfig(), **facts).compile
    assert not resolve(EngineConfig(compile=False), **facts).compile
    assert not resolve(EngineConfig(device="cpu"), **facts).compile
    assert not resolve(EngineConfig(attention_backend="torch"), **facts).compile
    with pytest.raises(ConfigError, match="compile needs a GPU"):
        resolve(EngineConfig(device="cpu", compile=True), **facts)


PROMPTS = ([*range(7, 51)], [*range(30, 54)], [*range(60, 73)])
CHUNKS = (40, 20, 9)


def make_plans() -> list[StepPlan]:
    """Seven steps: prompts without their last four tokens, these tokens, and five decodes."""
    greedy = SamplingParams(temperature=0)
    new_rows = [
        NewRow(row, as_token_ids(prompt), len(prompt), 0, greedy, seed=0, stop_ids=())
        for row, prompt in enumerate(PROMPTS)
    ]
    blocks, nothing = NewBlocks(), NewBlocks()
    for row in range(3):
        blocks.add(row, 0, [*range(1 + 4 * row, 5 + 4 * row)])

    def scheduled(num_tokens: Sequence[int], *, samples: bool) -> ScheduledRows:
        return ScheduledRows(np.arange(3), np.array(num_tokens), np.full(3, samples))

    chunks = scheduled(CHUNKS, samples=False)
    rest, decodes = scheduled([4, 4, 4], samples=True), scheduled([1, 1, 1], samples=True)
    return [
        StepPlan(0, new_rows, blocks, chunks, BatchShape(3, sum(CHUNKS), None), max_seq_len=40),
        StepPlan(1, [], nothing, rest, BatchShape(3, 12, 4), max_seq_len=44),
        *(StepPlan(2 + step, [], nothing, decodes, BatchShape(3, 3, 1), max_seq_len=45 + step) for step in range(5)),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_captured_steps_choose_the_tokens_of_steps_without_graphs(mode):
    def run(mode):
        unresolved = EngineConfig(device="cuda", graph_mode=mode, max_num_seqs=4, num_blocks=20, forbid_sync=True)
        config = resolve(unresolved, max_position=256, model_dtype=torch.float32, has_cuda=True)
        runner = start_runner(toy_model.toy_spec(), config)
        tokens_by_step = []
        for plan in make_plans():
            step = runner.launch(plan)
            step.wait()
            tokens_by_step.append(step.read_results().tokens.tolist())
        return runner.graphs.num_steps, tokens_by_step

    _, expected = run("none")
    counts, found = run(mode)
    assert found == expected
    assert len({token for tokens in found for token in tokens}) > 5
    counts.pop(("none", "prompt"))
    assert counts == {(mode, "prompt"): 2, ("full_decode_only", "decode"): 5}
