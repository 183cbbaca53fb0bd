import json
from dataclasses import replace

import pytest

from nanovllm_server.bench import grammars
from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.grammars import MIXES, GrammarsOptions
from nanovllm_server.bench.report import BenchError, OutputFiles


@pytest.fixture
def options(url, engine) -> GrammarsOptions:
    engine.endless, engine.delay = True, 0.002
    return GrammarsOptions(
        endpoint=parse_base_url(f"{url}/v1", None),
        model=None,
        num_streams=4,
        output_len=12,
        repeat=2,
        files=OutputFiles(),
    )


async def test_each_mix_sends_its_streams(options, engine):
    engine.compiling_s = 0.005
    model, results = await grammars.measure(options)
    assert model == "scripted"
    assert tuple(result.name for result in results) == MIXES
    unconstrained, half_constrained, with_compiling = results
    assert (unconstrained.ratio_p50, unconstrained.ratio_p99, unconstrained.tokens_constrained) == (1, 1, 0)
    assert half_constrained.tokens_constrained == with_compiling.tokens_constrained == 2 * 2 * 12
    assert unconstrained.compiled == half_constrained.compiled == 0
    assert with_compiling.compiled > 0
    assert with_compiling.refused == 0
    for result in results:
        assert 1 < result.itl.p50 <= result.itl.p99
        assert result.ratio_p50 > 0
    requests = [request.sampling for request in engine.requests]
    assert sum(sampling.grammar is None for sampling in requests) == 1 + 2 * (4 + 2 + 2)
    assert len({spec.source for spec in engine.compiled}) == 1 + with_compiling.compiled


async def test_refused_schemas_are_counted(options, engine):
    engine.grammar_errors = {"_19": "no"}
    _, results = await grammars.measure(replace(options, repeat=1))
    assert results[2].compiled == 0
    assert results[2].refused > 0


async def test_answers_that_end_early_are_an_error(options, engine):
    engine.endless, engine.reply = False, [*b"ab"]
    with pytest.raises(BenchError, match="ended early"):
        await grammars.measure(options)


def test_slow_schemas_differ_and_fit_into_a_request():
    assert grammars.slow_schema(1) != grammars.slow_schema(2)
    assert len(json.dumps(grammars.slow_schema(1))) < 1 << 20
