import asyncio
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import expire_after_first_token
from prometheus_client.parser import text_string_to_metric_families

from nanovllm_core import EngineStats
from nanovllm_core.engine.status import EngineInfo
from nanovllm_server.observability.metrics import Metrics, MetricsPrefix
from nanovllm_server.observability.process_metrics import ProcessMetrics
from nanovllm_server.observability.shared_counters import SharedCounters, allocate_counters

ENGINE_LABELS = {"model_name", "engine"}
# (type, labels) of vLLM's metrics for a text model with speculative decoding and without adapters.
VLLM_METRICS = {
    "num_requests_running": ("gauge", ENGINE_LABELS),
    "num_requests_waiting": ("gauge", ENGINE_LABELS),
    "kv_cache_usage_perc": ("gauge", ENGINE_LABELS),
    "gpu_cache_usage_perc": ("gauge", ENGINE_LABELS),
    "prefix_cache_queries": ("counter", ENGINE_LABELS),
    "prefix_cache_hits": ("counter", ENGINE_LABELS),
    "num_preemptions": ("counter", ENGINE_LABELS),
    "prompt_tokens": ("counter", ENGINE_LABELS),
    "generation_tokens": ("counter", ENGINE_LABELS),
    "request_success": ("counter", ENGINE_LABELS | {"finished_reason"}),
    "iteration_tokens_total": ("histogram", ENGINE_LABELS),
    "request_prompt_tokens": ("histogram", ENGINE_LABELS),
    "request_generation_tokens": ("histogram", ENGINE_LABELS),
    "request_max_num_generation_tokens": ("histogram", ENGINE_LABELS),
    "request_prefill_kv_computed_tokens": ("histogram", ENGINE_LABELS),
    "request_params_n": ("histogram", ENGINE_LABELS),
    "request_params_max_tokens": ("histogram", ENGINE_LABELS),
    "time_to_first_token_seconds": ("histogram", ENGINE_LABELS),
    "inter_token_latency_seconds": ("histogram", ENGINE_LABELS),
    "time_per_output_token_seconds": ("histogram", ENGINE_LABELS),
    "request_time_per_output_token_seconds": ("histogram", ENGINE_LABELS),
    "e2e_request_latency_seconds": ("histogram", ENGINE_LABELS),
    "request_queue_time_seconds": ("histogram", ENGINE_LABELS),
    "request_prefill_time_seconds": ("histogram", ENGINE_LABELS),
    "request_decode_time_seconds": ("histogram", ENGINE_LABELS),
    "request_inference_time_seconds": ("histogram", ENGINE_LABELS),
    "spec_decode_num_drafts": ("counter", ENGINE_LABELS),
    "spec_decode_num_draft_tokens": ("counter", ENGINE_LABELS),
    "spec_decode_num_accepted_tokens": ("counter", ENGINE_LABELS),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", ENGINE_LABELS | {"position"}),
    "cache_config_info": ("gauge", {"engine", "block_size", "cache_dtype", "num_gpu_blocks", "enable_prefix_caching"}),
}
FINISH_LATENCIES = (
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_time_per_output_token_seconds",
)


def read_samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    samples = (sample for family in families for sample in family.samples if sample.labels.keys() == {"model_name"})
    return {sample.name.removeprefix("nanovllm:"): sample.value for sample in samples}


def make_draft_stats() -> EngineStats:
    """Statistics of two steps: one accepts 1 of 3 drafts, the other accepts 2 of 2."""
    return EngineStats(verified_drafts_by_position=(2, 2, 1), accepted_drafts_by_position=(2, 1, 0))


def make_speculating_metrics(info: EngineInfo, prefix: MetricsPrefix) -> Metrics:
    counters = SharedCounters(allocate_counters(1))
    return Metrics("m", replace(info, draft_method="ngram"), make_draft_stats, counters, prefix=prefix)


@pytest.fixture
def vllm_metrics(engine) -> Metrics:
    return make_speculating_metrics(engine.info, "vllm")


@pytest.mark.parametrize("name", VLLM_METRICS)
def test_metric_has_the_type_and_labels_of_vllm(vllm_metrics, name):
    families = {family.name: family for family in text_string_to_metric_families(vllm_metrics.render().decode())}
    family = families[f"vllm:{name}"]
    metric_type, labels = VLLM_METRICS[name]
    assert family.type == metric_type
    assert family.samples
    assert all(labels <= sample.labels.keys() for sample in family.samples)
    assert all(sample.labels.keys() <= labels | {"le", "model_name"} for sample in family.samples)


def test_every_name_has_the_prefix(vllm_metrics, service):
    for metrics, prefix in ((vllm_metrics, "vllm:"), (service.metrics, "nanovllm:")):
        names = [family.name for family in text_string_to_metric_families(metrics.render().decode())]
        assert len(names) == len(set(names)) > 30
        assert all(name.startswith(prefix) for name in names)


def test_tool_calls_count_as_stops_in_vllms_metrics(vllm_metrics):
    for reason in ("stop", "tool_calls", "tool_calls"):
        vllm_metrics.finish_reasons.increment(reason)
    text = vllm_metrics.render().decode()
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3.0' in text
    assert "tool_calls" not in text


async def test_choices_count_their_prompt_once(post, service):
    body = await (await post(n=3, max_tokens=4)).get_json()
    samples = read_samples(service.metrics)
    prompt_tokens = body["usage"]["prompt_tokens"]
    assert samples["prompt_tokens_total"] == samples["request_prompt_tokens_sum"] == prompt_tokens
    assert samples["request_prefill_kv_computed_tokens_sum"] == prompt_tokens - 8
    for name in ("request_prompt_tokens", "request_prefill_kv_computed_tokens", "request_params_n"):
        assert samples[f"{name}_count"] == 1
    assert samples["request_params_n_sum"] == 3
    assert samples["request_params_max_tokens_sum"] == samples["request_max_num_generation_tokens_sum"] == 4
    assert samples["request_generation_tokens_count"] == 3
    assert samples["request_generation_tokens_sum"] == 12
    for name in FINISH_LATENCIES:
        assert samples[f"{name}_count"] == 3


async def test_latencies_of_phases_add_up(post, service, engine):
    engine.delay = 0.005
    begin = time.monotonic()
    await post()
    total = time.monotonic() - begin
    samples = read_samples(service.metrics)
    queue, prefill, decode, inference, e2e, ttft = (
        samples[f"{name}_sum"]
        for name in (
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "e2e_request_latency_seconds",
            "time_to_first_token_seconds",
        )
    )
    assert queue >= 0.005
    assert decode >= 5 * 0.005
    assert prefill + decode == pytest.approx(inference)
    assert ttft + decode == pytest.approx(e2e)
    assert queue + prefill <= ttft
    assert e2e <= total
    assert samples["inter_token_latency_seconds_sum"] == pytest.approx(decode)
    assert samples["request_time_per_output_token_seconds_sum"] == pytest.approx(decode / 5)


async def test_request_that_was_scheduled_at_once_has_no_queue_time(post, service, engine):
    engine.scheduled_time = time.monotonic()
    await post()
    samples = read_samples(service.metrics)
    assert samples["request_queue_time_seconds_sum"] == 0
    assert samples["request_prefill_time_seconds_sum"] > 0


async def test_aborted_request_has_no_finish_latencies(post, service, engine):
    engine.endless, engine.delay = True, 0.001
    answer = asyncio.create_task(post(timeout=30))
    await expire_after_first_token(service)
    assert (await answer).status_code == 504
    samples = read_samples(service.metrics)
    assert service.metrics.finish_reasons["abort"] == 1
    assert samples["time_to_first_token_seconds_count"] == 1
    for name in (*FINISH_LATENCIES, "request_prompt_tokens", "request_generation_tokens"):
        assert samples[f"{name}_count"] == 0


async def test_choice_that_a_stop_string_ends_has_latencies(post, service, engine):
    engine.endless = True
    assert (await post(n=2, stop=["lo"])).status_code == 200
    assert read_samples(service.metrics)["e2e_request_latency_seconds_count"] == 2


def test_steps_are_counted_by_their_tokens(service, engine):
    engine.stats = EngineStats(
        num_steps=6, num_computed_tokens=300, num_steps_by_size=((1, 2), (64, 3), (float("inf"), 1))
    )
    text = service.metrics.render().decode()
    for bound, count in (("1.0", 2), ("64.0", 5), ("+Inf", 6)):
        assert f'nanovllm:iteration_tokens_total_bucket{{le="{bound}",model_name="scripted"}} {count}.0' in text
    assert 'nanovllm:iteration_tokens_total_sum{model_name="scripted"} 300.0' in text


def test_drafts_are_counted_by_method_and_position(engine):
    text = make_speculating_metrics(engine.info, "nanovllm").render().decode()
    samples = {
        (sample.name.removeprefix("nanovllm:spec_decode_"), sample.labels.get("position")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "spec_decode" in sample.name
    }
    assert {key: sample.value for key, sample in samples.items()} == {
        ("num_drafts_total", None): 2,
        ("num_draft_tokens_total", None): 5,
        ("num_accepted_tokens_total", None): 3,
        ("num_draft_tokens_per_pos_total", "0"): 2,
        ("num_draft_tokens_per_pos_total", "1"): 2,
        ("num_draft_tokens_per_pos_total", "2"): 1,
        ("num_accepted_tokens_per_pos_total", "0"): 2,
        ("num_accepted_tokens_per_pos_total", "1"): 1,
        ("num_accepted_tokens_per_pos_total", "2"): 0,
    }
    assert {sample.labels["method"] for sample in samples.values()} == {"ngram"}


def test_without_speculation_drafts_have_no_metrics(service):
    assert "spec_decode" not in service.metrics.render().decode()


def test_loads_are_counted_by_tier_and_copies_by_direction(engine):
    stats = EngineStats(
        loaded_tokens=(("host", 100), ("disk", 20)),
        rejected_load_tokens=30,
        num_failed_loads=1,
        load_wait_s=0.5,
        copied_bytes=(("store", 4096), ("load", 2048)),
        copy_s=(("store", 0.25), ("load", 0.125)),
    )
    counters = SharedCounters(allocate_counters(1))
    text = Metrics("m", engine.info, lambda: stats, counters, prefix="nanovllm").render().decode()
    samples = {
        (sample.name.removeprefix("nanovllm:kv_offload_"), sample.labels.get("tier") or sample.labels.get("copy")): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "kv_offload" in sample.name
    }
    assert samples == {
        ("hits_total", "host"): 100,
        ("hits_total", "disk"): 20,
        ("bytes_total", "store"): 4096,
        ("bytes_total", "load"): 2048,
        ("copy_seconds_total", "store"): 0.25,
        ("copy_seconds_total", "load"): 0.125,
        ("recomputed_tokens_total", None): 30,
        ("failed_loads_total", None): 1,
        ("wait_seconds_total", None): 0.5,
    }


def read_transfer_samples(metrics: Metrics) -> dict[tuple[str, str | None], float]:
    return {
        (sample.name.partition(":kv_transfer_")[2], sample.labels.get("outcome")): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "kv_transfer" in sample.name
    }


@pytest.mark.parametrize("prefix", ["nanovllm", "vllm"])
@pytest.mark.parametrize("info_changes", [{"transfer_peers": ("a:1",)}, {"transfer_address": "a:1"}], ids=str)
def test_transfers_are_counted_by_outcome(engine, prefix, info_changes):
    stats = EngineStats(
        fetches=(("fetched", 3), ("peer_down", 1)),
        fetched_tokens=600,
        fetched_bytes=4096,
        fetch_s=0.5,
        served_bytes=2048,
        num_leases=2,
    )
    counters = SharedCounters(allocate_counters(1))
    metrics = Metrics("m", replace(engine.info, **info_changes), lambda: stats, counters, prefix=prefix)
    assert read_transfer_samples(metrics) == {
        ("requests_total", "fetched"): 3,
        ("requests_total", "peer_down"): 1,
        ("tokens_total", None): 600,
        ("fetched_bytes_total", None): 4096,
        ("served_bytes_total", None): 2048,
        ("wait_seconds_total", None): 0.5,
        ("leases", None): 2,
    }


def test_server_without_transfers_has_no_metrics_of_transfers(service):
    assert read_transfer_samples(service.metrics) == {}


def test_processes_have_metrics_by_name():
    counters = allocate_counters(2)
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        # The second row belongs to a worker that has not started.
        families = {family.name: family for family in ProcessMetrics(SharedCounters(counters), process.pid).collect()}
    finally:
        process.kill()
        process.join()
    assert families.keys() >= {
        "process_resident_memory_bytes",
        "process_cpu_seconds",
        "process_start_time_seconds",
        "process_open_fds",
    }
    for family in families.values():
        assert [sample.labels["process"] for sample in family.samples] == ["parent", "engine", "worker-0"]
    memory = families["process_resident_memory_bytes"].samples[-1].value
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert memory == pytest.approx(num_pages * os.sysconf("SC_PAGE_SIZE"), rel=0.5)
