"""Tests a decode engine that fetches the blocks of prompts from a prefill engine."""

import asyncio
import json
import threading
import time
from dataclasses import replace

import pytest
import toy_model
from summing_model import continue_sum, summing_spec
from toy_recurrent import Oracle, recurrent_spec
from transfer_pairs import (
    ANSWER_LEN,
    BLOCK_SIZE,
    CARRIERS,
    CONFIG,
    FETCHED_TOKENS,
    PROMPT_LEN,
    check_idle,
    generate,
    make_prompt,
    outcomes_of,
    start_pair,
    wait_until,
    with_fingerprint,
    write_secret,
)

from nanovllm_core import AsyncEngine, ConfigError, GrammarSpec, RequestError
from nanovllm_core.engine.trace import TRACK_IDS
from nanovllm_core.transfer import leases, prefix_client, prefix_server
from nanovllm_core.transfer.fetch_times import FetchTimes
from nanovllm_core.transfer.fetches import FetchOutcome
from nanovllm_core.transfer.messages import FetchEnd
from nanovllm_core.transfer.prefix_client import PeerConnection

pytestmark = [pytest.mark.background, pytest.mark.usefixtures("always_fetch", "long_silence")]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("make_spec", "settings", "make_oracle"),
    [
        (toy_model.toy_spec, {}, None),
        (toy_model.toy_spec, {"kv_cache_dtype": "fp8"}, lambda: toy_model.make_oracle(fp8_cache=True)),
        (recurrent_spec, {"num_state_slots": 10}, Oracle),
        (lambda: summing_spec(draft=summing_spec()), {"speculate": "draft"}, lambda: continue_sum),
    ],
    ids=["attention", "FP8 cache", "recurrent", "draft model"],
)
async def test_a_fetched_prompt_has_the_answer_of_a_computed_prompt(
    carrier, make_spec, settings, make_oracle, secret, oracle
):
    answer = oracle if make_oracle is None else make_oracle()
    num_prompts, fetched_tokens = 3, FETCHED_TOKENS // 64 * 64 if make_spec is recurrent_spec else FETCHED_TOKENS
    async with start_pair(secret, make_spec(), transfer_carrier=carrier, **settings) as (prefill, engine):
        prompts = [make_prompt(seed) for seed in range(num_prompts)]
        answers = await asyncio.gather(*(generate(engine, prompt) for prompt in prompts))
        assert answers == [answer(prompt, ANSWER_LEN) for prompt in prompts]
        assert outcomes_of(engine) == {"fetched": num_prompts}
        assert engine.stats.fetched_tokens == num_prompts * fetched_tokens == dict(engine.stats.loaded_tokens)["host"]
        await check_idle(prefill, engine)
        assert prefill.stats.served_bytes == engine.stats.fetched_bytes > 0
        assert prefill.stats.prompt_tokens == num_prompts * PROMPT_LEN


async def test_idle_engines_with_nixl_take_no_processor_time(secret, oracle, monkeypatch):
    monkeypatch.setattr(prefix_server, "LEASE_S", 3.0)
    async with start_pair(secret, transfer_carrier="nixl") as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        await check_idle(prefill, engine)
        await wait_until(lambda: not prefill._loop._transfers.server._is_serving_reads)
        begin_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - begin_s < 0.4  # a busy thread per engine would take 1 s


async def test_a_request_can_name_the_engine_that_has_computed_its_prompt(secret, oracle):
    async with start_pair(secret, decode={"prefill_peer": None}) as (prefill, engine):
        prompt, other = make_prompt(0), make_prompt(1)
        peer = prefill.info.transfer_address
        await generate(prefill, prompt, 1)
        assert await generate(engine, prompt, prefix_peer=peer) == oracle(prompt, ANSWER_LEN)
        assert engine.stats.fetched_tokens == FETCHED_TOKENS
        assert await generate(engine, other, prefix_peer=peer) == oracle(other, ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 1, "nothing": 1}
        assert prefill.stats.prompt_tokens == PROMPT_LEN
        with pytest.raises(RequestError, match="prefix_peer is '127.0.0.1:1', which is none"):
            await generate(engine, prompt, prefix_peer="127.0.0.1:1")


async def test_blocks_in_the_decode_engine_are_not_fetched(secret, oracle):
    async with start_pair(secret) as (_, engine):
        prompt = make_prompt(0)
        await generate(engine, prompt)
        longer = [*prompt, *make_prompt(1, 60)]
        assert await generate(engine, longer) == oracle(longer, ANSWER_LEN)
        assert await generate(engine, longer) == oracle(longer, ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 2, "cached": 1}
        assert engine.stats.fetched_tokens == 160 - 16


async def test_different_salts_share_no_blocks(secret, oracle):
    async with start_pair(secret) as (prefill, engine):
        prompt = make_prompt(0)
        for salt in ("a", "b"):
            assert await generate(engine, prompt, cache_salt=salt) == oracle(prompt, ANSWER_LEN)
        assert prefill.stats.num_cached_prompt_tokens == 0
        assert engine.stats.fetched_tokens == 2 * FETCHED_TOKENS


async def test_prompts_that_are_faster_to_compute_are_not_fetched(secret, oracle, monkeypatch):
    monkeypatch.setattr(FetchTimes, "is_worthwhile", lambda *_: False)
    async with start_pair(secret) as (prefill, engine):
        prompt = make_prompt(0)
        assert await generate(engine, prompt) == oracle(prompt, ANSWER_LEN)
        assert outcomes_of(engine) == {"slower": 1}
        assert prefill.stats.prompt_tokens == 0


async def test_a_prompt_that_exceeds_the_host_memory_is_computed(secret, oracle):
    async with start_pair(secret, decode={"kv_offload_gib": 4 * 8192 / 2**30}) as (_, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"no_space": 1}


async def test_prompts_larger_than_the_limit_of_held_bytes_are_served(secret, oracle, monkeypatch):
    monkeypatch.setattr(leases, "MAX_HELD_BYTES", 8192)
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0, 200)) == oracle(make_prompt(0, 200), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 1}
        await check_idle(prefill, engine)


async def test_no_fetch_brings_blocks_back_after_a_reset(secret, oracle, monkeypatch):
    original = prefix_client._copy_entries
    is_reset = threading.Event()

    def copy_after_the_reset(*arguments):
        assert is_reset.wait(timeout=60)
        return original(*arguments)

    monkeypatch.setattr(prefix_client, "_copy_entries", copy_after_the_reset)
    monkeypatch.setattr(PeerConnection, "reset_prefix_cache", lambda _: None)
    async with start_pair(secret) as (prefill, engine):
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: prefill.stats.num_leases == 1)
        await engine.reset_prefix_cache()
        is_reset.set()
        assert await task == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 1}
        assert engine.stats.num_cached_prompt_tokens == 0


async def test_a_reset_makes_the_prefill_engine_compute_again(secret, oracle):
    async with start_pair(secret) as (prefill, engine):
        for _ in range(2):
            await engine.reset_prefix_cache()
            assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 2}
        assert prefill.stats.num_cached_prompt_tokens == 0


async def test_a_grammar_constrains_the_answer_to_a_fetched_prompt(secret, vetter, monkeypatch):
    vetter.use(monkeypatch)
    grammar = GrammarSpec("regex", "(ab|ba)(true|null)[a-z]{3}")
    alone = await AsyncEngine.start(toy_model.toy_spec(), CONFIG)
    try:
        expected = await generate(alone, make_prompt(0), 12, grammar=grammar)
    finally:
        await alone.stop()
    async with start_pair(secret, toy_model.toy_spec()) as (_, engine):
        assert await generate(engine, make_prompt(0), 12, grammar=grammar) == expected
        assert outcomes_of(engine) == {"fetched": 1}


@pytest.mark.parametrize("is_last_message_lost", [False, True])
async def test_the_trace_has_a_span_for_each_fetch(is_last_message_lost, secret, tmp_path, monkeypatch):
    send = prefix_server.PrefixServer._send

    def lose_last_message(server, client, message, *payloads):
        if not isinstance(message, FetchEnd):
            send(server, client, message, *payloads)

    if is_last_message_lost:
        monkeypatch.setattr(prefix_server.PrefixServer, "_send", lose_last_message)
    async with start_pair(secret, decode={"trace": tmp_path / "trace.json"}) as (_, engine):
        await generate(engine, make_prompt(0))
    events = [json.loads(line.rstrip(",")) for line in (tmp_path / "trace.json").read_text().splitlines()[1:]]
    (fetch,) = [event for event in events if event["ph"] == "X" and event["tid"] == TRACK_IDS["fetch"]]
    assert fetch["name"].endswith(f": {FetchOutcome.FETCHED}")
    assert fetch["args"]["tokens"] == FETCHED_TOKENS
    assert fetch["args"]["arrived"] == fetch["args"]["entries"] == FETCHED_TOKENS // BLOCK_SIZE
    assert 0 < fetch["args"]["peer_us"] <= fetch["dur"]


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"transfer_listen": "127.0.0.1:0"}, "transfer_secret_file is None, but must be a file"),
        ({"transfer_listen": "localhost"}, "transfer_listen is localhost, but must be HOST:PORT"),
        ({"transfer_listen": "::1:5600"}, "transfer_listen is ::1:5600, but must be HOST:PORT"),
        ({"transfer_peers": ("host:99999",)}, "transfer_peers is host:99999, but must be HOST:PORT"),
        ({"transfer_peers": ("host:1",), "prefill_peer": "host:2"}, "prefill_peer is host:2, but must be one of"),
        ({"transfer_listen": "127.0.0.1:0", "kv_offload_gib": 0.0}, "kv_offload_gib is 0.0, but must be above 0"),
        ({"transfer_carrier": "rdma"}, "transfer_carrier is rdma, but must be one of"),
    ],
    ids=str,
)
async def test_invalid_settings_are_refused(settings, error):
    with pytest.raises(ConfigError, match=error):
        await AsyncEngine.start(with_fingerprint(toy_model.toy_spec()), replace(CONFIG, **settings))


async def test_unusable_secrets_and_addresses_are_refused(secret, tmp_path):
    spec, config = with_fingerprint(toy_model.toy_spec()), replace(CONFIG, transfer_listen="127.0.0.1:0")
    short, readable = tmp_path / "short", write_secret(tmp_path / "readable")
    short.write_bytes(b"secret")
    short.chmod(0o600)
    readable.chmod(0o644)
    for path, error in (
        (tmp_path / "missing", "can't be read: No such file"),
        (short, "has 6 bytes, but needs at least 32"),
        (readable, "which other users can access: run chmod 600"),
    ):
        with pytest.raises(ConfigError, match=error):
            await AsyncEngine.start(spec, replace(config, transfer_secret_file=path))
    config = replace(config, transfer_secret_file=secret)
    failing_config = replace(
        config, transfer_listen="192.0.2.1:1", kv_offload_dir=tmp_path / "files", kv_offload_disk_gib=0.1
    )
    with pytest.raises(ConfigError, match="transfer_listen is 192.0.2.1:1, where the engine can't listen"):
        await AsyncEngine.start(spec, failing_config)
    assert "nanovllm-files" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConfigError, match="need a model with a fingerprint"):
        await AsyncEngine.start(toy_model.toy_spec(), config)
