import pytest

from nanovllm_core import EngineStats
from nanovllm_server.chat.admission import AdmissionControl
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.observability.process_metrics import ProcessMetrics
from nanovllm_server.observability.shared_counters import MAX_COUNTERS, SharedCounters, allocate_counters
from nanovllm_server.protocol.error import ApiError


def test_queue_limit_covers_all_workers():
    memory = allocate_counters(3)
    admissions = [AdmissionControl(5, SharedCounters(memory, index)) for index in range(3)]
    releases = [admissions[0].admit(2), admissions[1].admit(2), admissions[2].admit(1)]
    assert [admission.num_active for admission in admissions] == [5, 5, 5]
    for admission in admissions:
        with pytest.raises(ApiError, match="5 sequences of at most 5"):
            admission.admit(1)
    releases[1]()
    assert admissions[1].idle.is_set()
    assert not admissions[0].idle.is_set()
    with pytest.raises(ApiError):
        admissions[0].admit(3)
    admissions[0].admit(2)
    assert admissions[2].num_active == 5


def test_sequences_of_a_dead_worker_are_released():
    memory = allocate_counters(2)
    first, second = AdmissionControl(4, SharedCounters(memory, 0)), AdmissionControl(4, SharedCounters(memory, 1))
    first.admit(1)
    second.admit(3)
    replacement = AdmissionControl(4, SharedCounters(memory, 1))
    assert first.num_active == replacement.num_active == 1
    replacement.admit(3)


def test_each_worker_reports_the_metrics_of_all_workers(engine):
    memory = allocate_counters(2)

    def make_metrics(index: int) -> Metrics:
        counters = SharedCounters(memory, index)
        AdmissionControl(1, counters)
        return Metrics("m", engine.info, EngineStats, counters)

    first, second = make_metrics(0), make_metrics(1)
    first.count_http("/health", 200)
    second.count_http("/health", 200)
    second.count_http("/made/up", 404)
    first.finish_reasons.increment("stop")
    second.finish_reasons.increment("abort")
    first.time_to_first_token.observe(0.003)
    second.time_to_first_token.observe(1000.0, count=2)
    assert first.render() == second.render()
    assert make_metrics(1).render() == first.render()
    text = first.render().decode()
    assert 'nanovllm:http_requests_total{path="/health",status="200"} 2.0' in text
    assert 'nanovllm:http_requests_total{path="other",status="404"} 1.0' in text
    assert 'nanovllm:request_success_total{finished_reason="abort",model_name="m"} 1.0' in text
    assert 'nanovllm:time_to_first_token_seconds_bucket{le="0.005",model_name="m"} 1.0' in text
    assert 'nanovllm:time_to_first_token_seconds_count{model_name="m"} 3.0' in text
    assert 'nanovllm:time_to_first_token_seconds_sum{model_name="m"} 2000.003' in text


def test_counters_of_a_worker_leave_a_quarter_of_its_row_free(engine):
    """Raise MAX_COUNTERS if this test fails."""
    counters = SharedCounters(allocate_counters(1))
    AdmissionControl(1, counters)
    Metrics("m", engine.info, EngineStats, counters, process_metrics=ProcessMetrics(counters, None))
    assert 1000 < counters.num_claimed <= MAX_COUNTERS * 3 // 4


def test_claiming_too_many_counters_is_an_error():
    counters = SharedCounters(allocate_counters(1))
    counters.claim(MAX_COUNTERS)
    with pytest.raises(ValueError, match="too few"):
        counters.claim(1)
