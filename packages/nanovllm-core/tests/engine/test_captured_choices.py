"""Requests have equal tokens and log-probabilities with and without graphs. On a CPU, stand-ins replace the graphs."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from toy_model import VOCAB, toy_spec

from nanovllm_core import AsyncEngine, EngineConfig, Request, SamplingParams
from nanovllm_core.execution import runner as runner_module
from nanovllm_core.execution.forward import ForwardOutput
from nanovllm_core.execution.graphs import CapturedStep, GraphShape, StepGraphs
from nanovllm_core.execution.token_choice import CAPTURED_OP_SETS
from nanovllm_core.outputs import TokenLogprobs
from nanovllm_core.sampling_params import ReasoningBudget

OUTPUT_LEN = 24
NUM_ROWS = 5
MAX_DRAFTS = 4
SPECULATE = [None, "ngram", "draft"]
PLAIN = [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}]
SPECIAL = [
    {"temperature": 0.0, "repetition_penalty": 3.0},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 40: -100.0}},
    {"temperature": 0.8, "forbidden_sequences": (*((token,) for token in range(20, 60)), (5, 6), (7, 8, 9))},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0, "top_k": 5, "logprobs": 0},
    {"temperature": 0.0, "reasoning_budget": ReasoningBudget(7, (11, 12, 13))},
    {"temperature": 0.0, "allowed_token_ids": (*range(20, 40), 70)},
    {"temperature": 1.0, "top_p": 0.9, "allowed_token_ids": tuple(range(0, 97, 3)), "logprobs": 2},
    {"temperature": 0.7, "frequency_penalty": 1.0, "reasoning_budget": ReasoningBudget(4, (14,)), "logprobs": 2},
]

Answer = tuple[list[int], list[TokenLogprobs]]


class StandInGraph:
    def __init__(self, targets: tuple[torch.Tensor, ...], compute: Callable[[], tuple[torch.Tensor, ...]]):
        self._targets = targets
        self._compute = compute

    def replay(self) -> None:
        for target, source in zip(self._targets, self._compute(), strict=True):
            target.copy_(source)


class StandInStepGraphs(StepGraphs):
    """Has a captured step for every decode. num_replays: numbers of replays by `SamplingOps`."""

    num_replays: dict[int, int] = {}
    num_draft_replays = 0

    def capture(self, functions):
        self._functions = functions

    def dispatch(self, batch, *, allows_graph=True):
        if (batch.query_len != 1 and not batch.has_drafts) or not allows_graph:
            return super().dispatch(batch, allows_graph=allows_graph)
        if batch.has_drafts:
            # Pad the requests, but not the tokens: the logits of padding are NaN, and sampling on a CPU refuses NaN.
            shape = GraphShape(NUM_ROWS, batch.num_tokens, 1 + MAX_DRAFTS, "full_decode_only", has_drafts=True)
            num_decodes = 0
            StandInStepGraphs.num_draft_replays += 1
        else:
            shape = GraphShape(batch.num_reqs, batch.num_reqs, 1, "full_decode_only")
            num_decodes = batch.num_reqs
        num_reqs, num_samples = shape.num_reqs, shape.num_tokens

        def ints(*sizes: int) -> torch.Tensor:
            return torch.empty(sizes, dtype=torch.int32)

        logits = torch.empty(num_samples, VOCAB)
        buffers = ForwardOutput(logits, ints(num_samples), ints(num_samples), ints(num_reqs), ints(num_reqs, 16))
        run_forward, choose_tokens, propose, proposer = self._functions
        outputs: list[ForwardOutput] = []

        def run():
            outputs[:] = [run_forward(shape, None, num_decodes=num_decodes)]
            return outputs[0][:5]

        def choose(ops):
            self.num_replays[ops] = self.num_replays.get(ops, 0) + 1
            return [tensor for tensor in choose_tokens(ops, buffers, batch.has_drafts) if tensor is not None]

        step = CapturedStep([StandInGraph(buffers[:5], run)], [], buffers)
        for ops in CAPTURED_OP_SETS:
            tokens, num_new = ints(num_samples), ints(num_reqs) if batch.has_drafts else None
            targets = (tokens,) if num_new is None else (tokens, num_new)
            step.choice_graphs.sampling[ops] = StandInGraph(targets, partial(choose, ops)), (tokens, num_new)
        for ops in () if proposer is None else proposer.captured_ops(may_propose=True):
            drafts = ints(num_reqs, 1 + MAX_DRAFTS)
            draft_graph = StandInGraph((drafts,), lambda ops=ops: (propose(ops, outputs[0]),))
            step.choice_graphs.proposing[ops] = draft_graph, drafts
        return step


def make_requests() -> list[Request]:
    """More requests than rows, so that plain and special requests follow each other in a row."""
    kinds = [*PLAIN, *SPECIAL, *PLAIN, *reversed(SPECIAL), *PLAIN, *SPECIAL]
    return [
        Request(
            f"r{index}",
            # Repeated tokens cause n-gram drafts.
            [7 + index, *range(3, 3 + index % 5), *[8, 9, 10, 11] * (index % 3)],
            SamplingParams(seed=index, max_tokens=6 + (7 * index) % OUTPUT_LEN, ignore_eos=True, **kind),
        )
        for index, kind in enumerate(kinds)
    ]


async def collect_answers(device: str, graph_mode: str, speculate: str | None = None) -> list[Answer]:
    config = EngineConfig(
        device=device,
        max_num_seqs=NUM_ROWS,
        num_blocks=100,
        graph_mode=graph_mode,
        depth=2,
        forbid_sync=device == "cuda",
        speculate=speculate,
        num_speculative_tokens=MAX_DRAFTS,
    )
    engine = await AsyncEngine.start(replace(toy_spec(), draft=toy_spec("small")), config)

    async def ask(request: Request) -> Answer:
        outputs = [output async for output in engine.generate(request)]
        return [token for output in outputs for token in output.new_token_ids], [
            entry for output in outputs for entry in output.logprobs or ()
        ]

    try:
        return await asyncio.gather(*map(ask, make_requests()))
    finally:
        await engine.stop()


def check_equal(found: list[Answer], expected: list[Answer]) -> None:
    for index, ((tokens, logprobs), (expected_tokens, expected_logprobs)) in enumerate(
        zip(found, expected, strict=True)
    ):
        assert tokens == expected_tokens, f"request {index}"
        assert len(logprobs) == len(expected_logprobs)
        for entry, other in zip(logprobs, expected_logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("speculate", SPECULATE)
async def test_stand_ins_for_graphs_choose_what_steps_without_graphs_choose(speculate, always_drafts, monkeypatch):
    expected = await collect_answers("cpu", "none")
    monkeypatch.setattr(runner_module, "StepGraphs", StandInStepGraphs)
    monkeypatch.setattr(StandInStepGraphs, "num_replays", {})
    monkeypatch.setattr(StandInStepGraphs, "num_draft_replays", 0)
    check_equal(await collect_answers("cpu", "none", speculate), expected)
    assert StandInStepGraphs.num_replays[CAPTURED_OP_SETS[-1]] > 20
    assert (StandInStepGraphs.num_draft_replays > 10) == (speculate is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("speculate", SPECULATE)
@pytest.mark.parametrize("graph_mode", ["full_decode_only", "piecewise", "full"])
async def test_graphs_choose_what_steps_without_graphs_choose(graph_mode, speculate):
    check_equal(await collect_answers("cuda", graph_mode, speculate), await collect_answers("cuda", "none"))
