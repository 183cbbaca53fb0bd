"""API keys, the queue limit, draining, and the other endpoints."""

import asyncio

import pytest
from contract import check_refusal
from prometheus_client.parser import text_string_to_metric_families

from nanovllm_core.engine.status import EngineStats
from nanovllm_server import __version__


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Bearer nope", "Basic secret", "secret", "Bearer sécret"]
)
async def test_wrong_api_key_is_rejected(post, service, engine, value):
    service.api_keys = ("secret",)
    response = await post(headers={} if value is None else {"Authorization": value})
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await response.get_json())["error"]["code"] == "invalid_api_key"
    assert engine.requests == []


async def test_right_api_key_is_accepted(post, client, service):
    service.api_keys = ("secret",)
    assert (await post(headers={"Authorization": "Bearer secret"})).status_code == 200
    for path in ("/v1/models", "/v1/models/scripted"):
        assert (await client.get(path)).status_code == 401
    for path in ("/health", "/ready", "/ping", "/load", "/version", "/metrics"):
        assert (await client.get(path)).status_code == 200


async def test_full_queue_is_a_429(post, engine, service):
    engine.delay = 0.02
    admitted_tasks = [asyncio.create_task(post(n=4)), asyncio.create_task(post(n=4))]
    while service.admission.num_active < 8:
        await asyncio.sleep(0.001)
    refused_response = await post()
    assert refused_response.status_code == 429
    assert int(refused_response.headers["Retry-After"]) >= 1
    assert (await refused_response.get_json())["error"]["code"] == "queue_full"
    assert [(await task).status_code for task in admitted_tasks] == [200, 200]
    assert service.admission.num_active == 0
    assert (await post()).status_code == 200


async def test_draining_server_is_a_503(post, client, service):
    service.admission.shutdown_reason = "the server is shutting down"
    response = await post()
    assert response.status_code == 503
    assert "Retry-After" in response.headers
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert "shutting down" in (await ready.get_json())["reason"]
    # An orchestrator would kill the process before the requests end if the liveness probes failed.
    for path in ("/health", "/ping"):
        assert (await client.get(path)).status_code == 200


async def test_dead_engine_is_a_503(post, client, engine):
    for path in ("/health", "/ready", "/ping"):
        assert (await client.get(path)).status_code == 200
    engine.die("out of memory")
    response = await post()
    assert response.status_code == 503
    assert "out of memory" in (await response.get_json())["error"]["message"]
    for path in ("/health", "/ready", "/ping"):
        health = await client.get(path)
        assert health.status_code == 503
        assert "out of memory" in (await health.get_json())["reason"]


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_death_in_mid_stream_is_an_error_event(post, engine, service, stream):
    engine.delay, engine.endless = 0.01, True
    task = asyncio.create_task(post(stream=stream))
    while not engine.requests:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    engine.die("out of memory")
    response = await task
    data = await response.get_data()
    if stream:
        assert response.status_code == 200
        assert data.endswith(b"data: [DONE]\n\n")
        assert b"event: error\n" in data
    else:
        assert response.status_code == 503
    assert b"out of memory" in data
    assert service.admission.num_active == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_bug_is_a_500_with_the_request_id(post, engine, service, stream):
    engine.crash = KeyError("secret detail")
    response = await post(stream=stream, headers={"X-Request-Id": "trace-7"})
    data = await response.get_data()
    assert response.status_code == 500
    assert b"trace-7" in data
    assert b"secret detail" not in data
    engine.crash = None
    assert (await post()).status_code == 200
    assert service.admission.num_active == 0


async def test_request_id_is_echoed_or_generated(post):
    response = await post(headers={"X-Request-Id": "abc"})
    assert response.headers["X-Request-Id"] == "abc"
    assert (await response.get_json())["id"] == "chatcmpl-abc"
    response = await post(request_id="mine")
    assert response.headers["X-Request-Id"] == "mine"
    assert (await response.get_json())["id"] == "chatcmpl-mine"
    ids = {(await post()).headers["X-Request-Id"] for _ in range(2)}
    assert len(ids) == 2
    assert len((await post(headers={"X-Request-Id": "x" * 300})).headers["X-Request-Id"]) == 32


async def test_two_clients_may_send_the_same_request_id(post, engine):
    engine.delay = 0.01
    responses = await asyncio.gather(*(post(headers={"X-Request-Id": "same"}) for _ in range(2)))
    assert [response.status_code for response in responses] == [200, 200]


async def test_models_are_listed_under_each_name(client):
    body = await (await client.get("/v1/models")).get_json()
    assert [model["id"] for model in body["data"]] == ["scripted", "alias"]
    assert body["data"][0]["max_model_len"] == 512


async def test_model_is_found_by_each_of_its_names(client, service):
    service.model_names = ("scripted", "org/name")
    listed = (await (await client.get("/v1/models")).get_json())["data"]
    for model, path in zip(listed, ("scripted", "org%2Fname"), strict=True):
        assert await (await client.get(f"/v1/models/{path}")).get_json() == model
    assert await (await client.get("/v1/models/org/name")).get_json() == listed[1]


@pytest.mark.parametrize("name", ["gpt-9", "org", "a/b/c", "%00"])
async def test_retrieving_an_unknown_model_is_a_404(client, name):
    error = await check_refusal(await client.get(f"/v1/models/{name}"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "scripted" in error["message"]


async def test_load_is_the_number_of_sequences_in_the_server(client, post, service, engine):
    engine.delay = 0.02
    assert await (await client.get("/load")).get_json() == {"server_load": 0}
    task = asyncio.create_task(post(n=3))
    while not service.admission.num_active:
        await asyncio.sleep(0.001)
    assert await (await client.get("/load")).get_json() == {"server_load": 3}
    assert (await task).status_code == 200
    assert await (await client.get("/load")).get_json() == {"server_load": 0}


async def test_version_endpoint_returns_the_servers_version(client):
    assert await (await client.get("/version")).get_json() == {"version": __version__}


async def test_alias_is_answered_by_its_name(post):
    assert (await (await post(model="alias")).get_json())["model"] == "alias"


async def scrape(client):
    response = await client.get("/metrics")
    text = await response.get_data(as_text=True)
    return {
        (sample.name, *(value for name, value in sorted(sample.labels.items()) if name != "model_name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_report_requests_and_engine(client, post, engine):
    engine.stats = EngineStats(
        num_requests_running=3,
        num_blocks=10,
        num_free_blocks=4,
        num_cached_prompt_tokens=7,
        step_limit_s=0.05,
        step_time_coefficients=(("per_token", 2e-5),),
    )
    engine.delay = 0.002
    await post()
    await post(max_tokens=2)
    await post(n=0)
    values = await scrape(client)
    assert values["nanovllm:num_requests_running",] == 3
    assert values["nanovllm:kv_cache_usage_perc",] == pytest.approx(0.6)
    assert values["nanovllm:prefix_cache_hits_total",] == 7
    assert values["nanovllm:step_limit_seconds",] == 0.05
    assert values["nanovllm:step_time_coefficient_seconds", "per_token"] == 2e-5
    assert values["nanovllm:cache_config_info", "16", "float32", "True", "64"] == 1
    assert values["nanovllm:request_success_total", "stop"] == 1
    assert values["nanovllm:request_success_total", "length"] == 1
    assert values["nanovllm:time_to_first_token_seconds_count",] == 2
    assert values["nanovllm:inter_token_latency_seconds_count",] == 5 + 1
    assert values["nanovllm:e2e_request_latency_seconds_bucket", "+Inf"] == 2
    assert values["nanovllm:request_generation_tokens_sum",] == 8
    assert values["nanovllm:http_requests_total", "/v1/chat/completions", "200"] == 2
    assert values["nanovllm:http_requests_total", "/v1/chat/completions", "400"] == 1


async def test_metrics_do_not_grow_with_made_up_paths(client):
    for index in range(3):
        await client.get(f"/made-up-{index}")
    values = await scrape(client)
    assert values["nanovllm:http_requests_total", "other", "404"] == 3
