"""Which captured step answers for a batch. Capture and replay themselves are seen in the engine's tests on a GPU."""

import pytest

from nanovllm_core.config import ConfigError, EngineConfig, resolve
from nanovllm_core.execution.graphs import CapturedStep, GraphShape, StepGraphs, decode_sizes, graph_shapes
from nanovllm_core.scheduling.plan import BatchShape


@pytest.mark.parametrize("most", [1, 2, 7, 16, 100, 256, 1000])
def test_decodes_are_padded_by_few(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(1, most + 1):
        padded = next(size for size in sizes if size >= count)
        assert padded - count < max(8, count / 3)
    assert len(sizes) < 50


def test_shapes_come_largest_first_and_within_the_budget():
    shapes = graph_shapes("full", 64, 700)
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert {shape.num_tokens for shape in shapes if shape.max_query_len > 1} == {64, 128, 256, 512}
    assert all(shape.num_reqs == 64 for shape in shapes if shape.max_query_len > 1)
    assert {shape.max_query_len for shape in graph_shapes("full_decode_only", 64, 700)} == {1}
    assert graph_shapes("none", 64, 700) == []


class Graphs(StepGraphs):
    """With every shape captured, by nothing."""

    def __init__(self, mode):
        super().__init__(graph_shapes(mode, 16, 256))
        self._steps = {shape: shape for shape in self._shapes}


def found(graphs: StepGraphs, *batch) -> GraphShape | CapturedStep | None:
    return graphs.dispatch(BatchShape(*batch))


def test_the_smallest_that_holds_the_batch_answers():
    graphs = Graphs("full")
    assert found(graphs, 3, 3, 1) == GraphShape(4, 4, 1)
    assert found(graphs, 16, 16, 1) == GraphShape(16, 16, 1)
    assert found(graphs, 3, 50, None) == GraphShape(16, 64, 64)
    assert found(graphs, 2, 130, 65) == GraphShape(16, 256, 256)
    assert found(graphs, 2, 257, None) is None
    assert graphs.counts == {("full_decode_only", "decode"): 2, ("full", "mixed"): 2, ("none", "mixed"): 1}


def test_without_mixed_graphs_a_mix_is_launched_kernel_by_kernel():
    graphs = Graphs("full_decode_only")
    assert found(graphs, 3, 50, None) is None
    assert found(graphs, 1, 1, 1) == GraphShape(1, 1, 1)
    assert found(Graphs("none"), 1, 1, 1) is None


def test_graphs_need_kernels_that_never_wait():
    import torch

    facts = {"max_position": 64, "model_dtype": torch.float32}
    assert resolve(EngineConfig(device="cpu"), has_cuda=True, **facts).graph_mode == "none"
    assert resolve(EngineConfig(), has_cuda=True, **facts).graph_mode == "full"
    assert resolve(EngineConfig(graph_mode="none"), has_cuda=True, **facts).graph_mode == "none"
    with pytest.raises(ConfigError, match="graph_mode 'full' needs a GPU"):
        resolve(EngineConfig(device="cpu", graph_mode="full"), has_cuda=True, **facts)
