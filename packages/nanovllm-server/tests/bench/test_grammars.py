"""`nanovllm-bench grammars` over a real socket."""

import json
from dataclasses import replace

import pytest

from nanovllm_server.bench import grammars
from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.grammars import MIXES, GrammarsJob
from nanovllm_server.bench.report import BenchError, Results


@pytest.fixture
def job(url, engine) -> GrammarsJob:
    engine.endless, engine.delay = True, 0.002
    return GrammarsJob(
        endpoint=parse_base_url(f"{url}/v1", None),
        model=None,
        num_streams=4,
        output_len=12,
        repeat=2,
        results=Results(None, None),
    )


async def test_each_mix_sends_its_streams(job, engine):
    engine.compiling_s = 0.005
    model, mixes = await grammars.measure(job)
    assert model == "scripted"
    assert tuple(mix.name for mix in mixes) == MIXES
    free, held, compiling = mixes
    assert (free.ratio_p50, free.ratio_p99, free.tokens_held) == (1, 1, 0)
    assert held.tokens_held == compiling.tokens_held == 2 * 2 * 12
    assert free.compiled == held.compiled == 0
    assert compiling.compiled > 0
    assert compiling.refused == 0
    for mix in mixes:
        assert 1 < mix.itl.p50 <= mix.itl.p99 < 1000
        assert 0 < mix.ratio_p50 < 100
    requests = [request.sampling for request in engine.requests]
    assert sum(sampling.grammar is None for sampling in requests) == 1 + 2 * (4 + 2 + 2)
    # One for all that are held, and each of those that are compiled another.
    assert len({spec.source for spec in engine.compiled}) == 1 + compiling.compiled


async def test_schemas_that_are_refused_are_counted(job, engine):
    engine.grammar_errors = {"_19": "no"}
    _, mixes = await grammars.measure(replace(job, repeat=1))
    assert mixes[2].compiled == 0
    assert mixes[2].refused > 0


async def test_answers_that_end_early_are_an_error(job, engine):
    engine.endless, engine.reply = False, [*b"ab"]
    with pytest.raises(BenchError, match="ended early"):
        await grammars.measure(job)


def test_schemas_are_what_they_say():
    assert grammars.hostile(1) != grammars.hostile(2)
    assert len(json.dumps(grammars.hostile(1))) < 1 << 20
