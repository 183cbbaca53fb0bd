"""`kv_transfer_params` between a prefill server and a decode server."""

from dataclasses import replace

import pytest
from contract import check_refusal
from sse import parse_events

from nanovllm_server.settings import TransferSettings

FIELD = "kv_transfer_params"
PEERS = ("10.0.0.1:5600", "node-1:5601", "[::1]:5602")
# vllm-router sends this object to a prefill server.
ASK_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ASK_DECODE = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_port": 5600}


@pytest.fixture
def prefill_server(service, engine):
    engine.info = replace(engine.info, transfer_engine_id="engine-7", transfer_address="0.0.0.0:5600", num_ranks=2)
    service.transfer = TransferSettings(role="prefill", advertised_host="node-1.example.com")


@pytest.fixture
def decode_server(service, engine):
    engine.info = replace(engine.info, transfer_peers=PEERS)
    service.transfer = TransferSettings(role="decode")


async def test_prefill_server_describes_the_computed_prompt(prefill_server, post, engine):
    body = await (await post(kv_transfer_params=ASK_PREFILL, max_tokens=1)).get_json()
    assert body[FIELD] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-7",
        "remote_block_ids": [],
        "remote_request_id": body["id"],
        "remote_host": "node-1.example.com",
        "remote_port": 5600,
        "tp_size": 2,
        "remote_num_tokens": body["usage"]["prompt_tokens"],
    }
    assert engine.requests[0].prefix_peer == ""


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("burst", [1, 50])
@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": True}], ids=str)
async def test_last_chunk_with_a_choice_describes_the_computed_prompt(prefill_server, post, engine, n, burst, options):
    engine.burst = burst
    response = await post(kv_transfer_params=ASK_PREFILL, stream=True, stream_options=options, n=n)
    chunks = [chunk for chunk in parse_events(await response.get_data()) if chunk["choices"]]
    assert [FIELD in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1][FIELD]["remote_request_id"] == chunks[-1]["id"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"do_remote_decode": None, "new": [1]}])
async def test_prefill_server_describes_no_prompt_unless_asked(prefill_server, post, params):
    body = await (await post(kv_transfer_params=params)).get_json()
    assert FIELD not in body
    assert FIELD.encode() not in await (await post(kv_transfer_params=params, stream=True)).get_data()


@pytest.mark.parametrize(
    ("host", "port", "peer"),
    [
        ("10.0.0.1", 5600, PEERS[0]),
        ("node-1", 5601, PEERS[1]),
        ("NODE-1", 5601.0, PEERS[1]),
        ("::1", 5602, PEERS[2]),
        ("0:0:0:0:0:0:0:1", 5602, PEERS[2]),
    ],
)
async def test_decode_server_names_the_peer_to_the_engine(decode_server, post, engine, host, port, peer):
    params = {**ASK_DECODE, "remote_host": host, "remote_port": port, "remote_block_ids": [[1], [2]], "tp_size": 1}
    assert (await post(kv_transfer_params=params)).status_code == 200
    assert [request.prefix_peer for request in engine.requests] == [peer]


async def test_answer_of_a_prefill_server_fits_a_decode_server(prefill_server, service, post, engine):
    body = await (await post(kv_transfer_params=ASK_PREFILL)).get_json()
    service.transfer = TransferSettings(role="decode")
    engine.info = replace(engine.info, transfer_peers=("node-1.example.com:5600",))
    assert (await post(kv_transfer_params=body[FIELD])).status_code == 200
    assert engine.requests[1].prefix_peer == "node-1.example.com:5600"


async def test_only_the_first_choice_fetches(decode_server, post, engine):
    long_messages = [{"role": "user", "content": "a long prompt, of several blocks"}]
    assert (await post(kv_transfer_params=ASK_DECODE, messages=long_messages, n=3)).status_code == 200
    assert [request.prefix_peer for request in engine.requests] == [PEERS[0], "", ""]


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_prefill": False}, {"do_remote_prefill": None, "remote_host": "elsewhere", "remote_port": 1}],
)
async def test_decode_server_names_no_peer_unless_asked(decode_server, post, engine, params):
    assert (await post(kv_transfer_params=params)).status_code == 200
    assert engine.requests[0].prefix_peer == ""


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"remote_host": None}, "remote_host"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": "10.0.0.2"}, "remote_host"),
        ({"remote_host": "10.0.0.1:5600"}, "remote_host"),
        ({"remote_host": "ipc:///tmp/engine"}, "remote_host"),
        ({"remote_host": 7}, "remote_host"),
        ({"remote_host": "a" * 256}, "remote_host"),
        ({"remote_port": 5601}, "remote_host"),
        ({"remote_port": None}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"do_remote_prefill": 1}, "do_remote_prefill"),
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({"do_remote_decode": True}, "do_remote_decode"),
    ],
    ids=str,
)
async def test_invalid_field_is_a_400_that_names_the_field(decode_server, post, engine, changes, field):
    await check_refusal(await post(kv_transfer_params={**ASK_DECODE, **changes}), 400, f"{FIELD}.{field}")
    assert not engine.requests


async def test_error_lists_no_addresses_of_other_peers(decode_server, post):
    response = await post(kv_transfer_params={**ASK_DECODE, "remote_host": "10.0.0.2"})
    error = await check_refusal(response, 400, f"{FIELD}.remote_host")
    assert "10.0.0.2 with port 5600" in error["message"]
    assert "10.0.0.1" not in error["message"]


async def test_absent_host_is_called_missing(decode_server, post):
    params = {"do_remote_prefill": True, "remote_port": 5600}
    error = await check_refusal(await post(kv_transfer_params=params), 400, f"{FIELD}.remote_host")
    assert error["code"] == "missing_required_parameter"


async def test_prefill_server_refuses_to_fetch(prefill_server, post):
    error = await check_refusal(await post(kv_transfer_params=ASK_DECODE), 400, f"{FIELD}.do_remote_prefill")
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize("params", [ASK_PREFILL, ASK_DECODE, {"do_remote_prefill": False}], ids=str)
async def test_server_without_a_role_refuses_the_field(post, params):
    error = await check_refusal(await post(kv_transfer_params=params), 400, FIELD)
    assert error["code"] == "unsupported_parameter"
    assert "--role" in error["message"]


@pytest.mark.parametrize("params", [7, [], "x", False])
async def test_field_must_be_an_object(post, params):
    await check_refusal(await post(kv_transfer_params=params), 400, FIELD)
