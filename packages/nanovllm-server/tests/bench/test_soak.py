"""`nanovllm-bench soak` over a real socket. The test's own process is the server."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from loopback import until

from nanovllm_server.bench import bench_cli
from nanovllm_server.bench.client import parse_base_url
from nanovllm_server.bench.report import BenchError, OutputFiles
from nanovllm_server.bench.soak import soak_command, soak_traffic
from nanovllm_server.bench.soak.server_processes import ProcessMemory, ServerProcesses
from nanovllm_server.bench.soak.soak_command import SoakOptions, SoakResult, TrafficCounts
from nanovllm_server.bench.soak.soak_traffic import Exchange, TrafficSource, run_exchange
from nanovllm_server.bench.soak.warm_up import Phase, WarmUp

MIB = 1 << 20
MAX_PROMPT_WORDS = 20
# Prompts of `tools` exceed the scripted engine's context. An exchange of `slow reader` takes seconds.
QUICK_KINDS = [kind for kind in soak_traffic.KINDS if kind not in ("tools", "slow reader")]
ANSWERED_KINDS = [kind for kind in QUICK_KINDS if kind not in ("disconnect", "incomplete body")]


class ClockWithoutStops:
    """A clock that advances by at most MAX_STEP_S per call, as if a busy machine did not stop this process."""

    MAX_STEP_S = 0.2

    def __init__(self):
        self._time_s, self._read_s = 0.0, time.monotonic()

    def read(self) -> float:
        last_read_s, self._read_s = self._read_s, time.monotonic()
        self._time_s += min(self._read_s - last_read_s, self.MAX_STEP_S)
        return self._time_s


@pytest.fixture
def source(url, engine) -> TrafficSource:
    engine.delay = 0.001
    return TrafficSource(parse_base_url(f"{url}/v1", None), "scripted", 0, MAX_PROMPT_WORDS)


@pytest.fixture
def options(url, engine, monkeypatch) -> SoakOptions:
    engine.delay = 0.001
    monkeypatch.setattr(soak_traffic, "KINDS", QUICK_KINDS)
    monkeypatch.setattr(soak_command, "NUM_LARGE_SCHEMAS", 4)
    monkeypatch.setattr(soak_command, "MIN_LONG_PROMPT_BYTES", 1)
    return SoakOptions(
        endpoint=parse_base_url(f"{url}/v1", None),
        model=None,
        server_pid=os.getpid(),
        num_clients=4,
        max_prompt_words=MAX_PROMPT_WORDS,
        duration_s=2,
        max_warm_up_s=0.5,
        min_flat_s=0.2,
        sample_interval_s=0.1,
        max_growth_percent=2,
        seed=0,
        files=OutputFiles(),
    )


@pytest.mark.parametrize("kind", ANSWERED_KINDS)
async def test_each_kind_of_exchange_gets_an_allowed_answer(source, kind):
    for _ in range(3):
        outcome = await run_exchange(source, soak_traffic.EXCHANGES[kind](source))
        assert outcome.failure is None


async def test_disconnects_leave_no_request(source, engine, monkeypatch):
    # No request gets its first token within the test.
    engine.delay = 3600
    exchange = soak_traffic.EXCHANGES["disconnect"](source)
    monkeypatch.setattr(source.random, "random", lambda: 0.05)
    # On a busy machine, a client may disconnect before its request reaches the engine.
    while not engine.requests:
        assert (await run_exchange(source, exchange)).failure is None
    await until(lambda: sorted(engine.aborted) == sorted(engine.keys) and engine.num_active == 0)
    assert not await soak_command.wait_until_idle(source.endpoint)


@pytest.mark.parametrize(
    ("exchange", "failure"),
    [
        (Exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", frozenset([404])), "200"),
        (
            Exchange(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", is_stream=True),
            "incomplete",
        ),
    ],
)
async def test_answers_that_are_not_allowed_are_failures(source, exchange, failure):
    assert failure in ((await run_exchange(source, exchange)).failure or "")


async def test_traffic_is_counted_and_memory_is_sampled(options, monkeypatch):
    monkeypatch.setattr(soak_command, "time", SimpleNamespace(monotonic=ClockWithoutStops().read))
    # A busy machine needs more time for the warm-up.
    options = replace(options, duration_s=6, max_warm_up_s=4)
    result = await soak_command.soak(options)
    assert result.counts.exchanges_by_kind["large schema"] >= options.num_clients
    assert result.counts.exchanges_by_kind["long prompt"] >= options.num_clients
    assert result.counts.exchanges_by_kind["prompt of each length"] > MAX_PROMPT_WORDS
    assert 0 < result.warm_up_s < options.duration_s
    assert result.counts.exchanges_by_kind.keys() & set(QUICK_KINDS)
    assert result.counts.failures == []
    assert result.counts.num_5xx == 0
    assert result.busy_gauges == {}
    assert os.getpid() in {memory.pid for memory in result.lasting}


async def test_5xx_of_the_server_are_violations(options, engine):
    engine.crash = RuntimeError("broken")
    result = await soak_command.soak(options)
    assert result.counts.num_5xx > 0
    violations = result.violations(1000)
    assert any("5xx" in violation for violation in violations)
    assert any("failed exchanges" in violation for violation in violations)


def test_growth_compares_the_first_and_last_samples():
    steady = ProcessMemory(1, 0, "steady", [100 * MIB, 300 * MIB, *[100 * MIB] * 8])
    grown = ProcessMemory(2, 1, "grown", [size * MIB for size in (100, 100, *range(100, 106), 102, 102)])
    result = SoakResult("model", 600, True, TrafficCounts(), [steady, grown], [], {"kv_cache_usage_perc": 0.5})
    assert result.violations(2) == ["process 2 (grown) grew by 2.00%", "kv_cache_usage_perc is 0.5 on the idle server"]
    assert result.violations(2.5) == ["kv_cache_usage_perc is 0.5 on the idle server"]


def test_each_warm_up_phase_ends_after_flat_memory():
    warm_up = WarmUp(10, 1000, 0, 0)
    for now in range(50):
        warm_up.add_sample(now, {1: (100 + now) * MIB, 2: 100 * MIB})
        assert warm_up.phase is Phase.FILL
    phases = list[Phase]()
    for now in range(50, 90):
        warm_up.add_sample(now, {1: 150 * MIB, 2: 100 * MIB, **({3: now} if now == 55 else {})})
        phases.append(warm_up.phase)
    assert phases.count(Phase.SETTLE) >= 10
    assert phases == sorted(phases, key=lambda phase: phase.value)
    assert (warm_up.phase, warm_up.is_flat) == (Phase.MEASURE, True)


def test_warm_up_of_a_growing_server_ends_at_its_limit():
    warm_up = WarmUp(10, 100, 0, 0)
    for now in range(100):
        warm_up.add_sample(now, {1: (100 + now) * MIB})
        assert warm_up.phase is Phase.FILL
    warm_up.add_sample(100, {1: 200 * MIB})
    assert (warm_up.phase, warm_up.is_flat) == (Phase.MEASURE, False)


def test_warm_up_lasts_until_all_filling_requests_are_sent():
    warm_up = WarmUp(10, 1000, 1, 1)
    for now in range(20):
        warm_up.add_sample(now, {1: MIB})
    warm_up.num_long_prompts_left = 0
    warm_up.add_sample(20, {1: MIB})
    assert warm_up.phase is Phase.FILL
    warm_up.num_large_schemas_left = 0
    warm_up.add_sample(21, {1: MIB})
    assert warm_up.phase is Phase.SETTLE


async def test_long_prompts_are_encoded_and_refused_without_running_the_model(source, engine):
    exchange = source.build_long_prompt_request(engine.info.max_model_len)
    outcome = await run_exchange(source, exchange)
    assert (outcome.status, outcome.failure) == (400, None)
    assert not engine.requests


def test_unknown_server_process_is_an_error():
    with pytest.raises(BenchError, match="--server-pid"):
        ServerProcesses(1 << 30)


def test_warm_up_must_be_shorter_than_the_soak(capsys):
    assert bench_cli.main(["soak", "--server-pid", "1", "--minutes", "1", "--warm-up-minutes", "1"]) == 2
    assert "--warm-up-minutes 1 must be less than --minutes 1" in capsys.readouterr().err


def test_server_with_tls_is_refused(capsys):
    assert bench_cli.main(["soak", "https://127.0.0.1/v1", "--server-pid", "1"]) == 2
    assert "give a base URL with http://" in capsys.readouterr().err
