"""Tests fetches that fail, end early or are refused: the decode engine then computes the prompts."""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import toy_model
import zmq.asyncio
from transfer_pairs import (
    ANSWER_LEN,
    BLOCK_SIZE,
    CARRIERS,
    CONFIG,
    FETCHED_TOKENS,
    MAX_SILENCE_S,
    allow_long_silence,
    check_idle,
    generate,
    make_prompt,
    outcomes_of,
    peer_of,
    start_pair,
    wait_until,
    with_fingerprint,
    write_secret,
)

from nanovllm_core import AsyncEngine
from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.transfer import fetches, prefix_client, prefix_server
from nanovllm_core.transfer.fetch_times import FetchTimes
from nanovllm_core.transfer.fetches import PrefixFetch
from nanovllm_core.transfer.leases import LeaseTable
from nanovllm_core.transfer.messages import PROTOCOL_VERSION, Fetch, Hello, ReadyEntry, encode
from nanovllm_core.transfer.prefix_client import PeerConnection

pytestmark = [pytest.mark.background, pytest.mark.usefixtures("always_fetch")]

MIN_FETCH_S, SLOW_PROMPT_S = 1.5, 10.0
# A loaded machine may add seconds to the limits of a fetch.
MAX_DELAY_S = 30.0
SILENCE_S = prefix_client.SILENCE_S


async def generate_with_lost_fetch(engine: AsyncEngine, prompt: list[int], patch: pytest.MonkeyPatch) -> list[int]:
    """Generate an answer while the peer is silent. The limit SILENCE_S is only short after the fetch's first seconds.

    If the machine stops the process, the peer could otherwise be down before the fetch begins.
    """
    answer = asyncio.create_task(generate(engine, prompt))
    await wait_until(lambda: len(peer_of(engine)._fetches) > 0)
    await asyncio.sleep(MIN_FETCH_S)
    patch.setattr(prefix_client, "SILENCE_S", SILENCE_S)
    return await answer


@pytest.mark.usefixtures("long_silence")
async def test_the_decode_engine_computes_if_the_peer_is_down(secret, oracle, monkeypatch):
    observed: list[tuple[int, float, float]] = []
    monkeypatch.setattr(FetchTimes, "observe", lambda _, *times: observed.append(times))
    async with start_pair(secret) as (prefill, engine):
        engine._loop._scheduler.tier.predict_compute = lambda *_: SLOW_PROMPT_S
        await prefill.stop()
        prompts = [make_prompt(seed) for seed in range(2)]
        begin_s = time.monotonic()
        assert await generate_with_lost_fetch(engine, prompts[0], monkeypatch) == oracle(prompts[0], ANSWER_LEN)
        assert time.monotonic() - begin_s < MAX_DELAY_S
        await wait_until(lambda: not peer_of(engine).is_ready)
        assert await generate(engine, prompts[1]) == oracle(prompts[1], ANSWER_LEN)
        assert outcomes_of(engine) == {"lost": 1, "peer_down": 1}
        # `fetch_s` covers the wait for the peer and the computation.
        ((num_tokens, fetch_s, compute_s),) = observed
        assert (num_tokens, compute_s) == (FETCHED_TOKENS, SLOW_PROMPT_S)
        assert fetch_s > MIN_FETCH_S + SLOW_PROMPT_S
        await check_idle(engine)


async def test_a_restarted_peer_is_used_again(secret, oracle, tmp_path, monkeypatch):
    address = f"ipc://{tmp_path}/transfer"
    spec, config = with_fingerprint(toy_model.toy_spec()), replace(CONFIG, transfer_secret_file=secret)
    engine = await AsyncEngine.start(spec, replace(config, transfer_peers=(address,), prefill_peer=address))
    try:
        for seed in range(2):
            allow_long_silence(monkeypatch)
            prefill = await AsyncEngine.start(spec, replace(config, transfer_listen=address))
            await wait_until(lambda: peer_of(engine).is_ready)
            assert await generate(engine, make_prompt(seed)) == oracle(make_prompt(seed), ANSWER_LEN)
            monkeypatch.setattr(prefix_client, "SILENCE_S", SILENCE_S)
            await prefill.stop()
            await wait_until(lambda: not peer_of(engine).is_ready)
        assert outcomes_of(engine) == {"fetched": 2}
    finally:
        await engine.stop()


async def test_an_engine_without_the_secret_can_not_connect(secret, oracle, tmp_path):
    other_secret = write_secret(tmp_path / "other")
    decode = {"transfer_secret_file": other_secret}
    async with start_pair(secret, decode=decode, awaits_peer=False) as (prefill, engine):
        await asyncio.sleep(1)
        assert not peer_of(engine).is_ready
        assert not prefill._loop._transfers.server._hello_s
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"peer_down": 1}


@pytest.mark.usefixtures("long_silence")
async def test_a_connection_without_keys_is_ignored(secret, oracle):
    async with start_pair(secret) as (prefill, engine):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{prefill.info.transfer_address}")
            await socket.send(b"\x80")
            assert not await socket.poll(500)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 1}


@pytest.mark.usefixtures("long_silence")
async def test_malformed_messages_end_no_connection(secret, oracle, monkeypatch):
    errors: list[str] = []
    mark_down = PeerConnection._mark_down

    def mark_down_and_record(peer, error):
        errors.append(error)
        mark_down(peer, error)

    monkeypatch.setattr(PeerConnection, "_mark_down", mark_down_and_record)
    malformed = encode(Hello(PROTOCOL_VERSION, {"ab": ""}, [])).replace(b"ab", b"\xff\xfe")
    async with start_pair(secret) as (prefill, engine):
        server = prefill._loop._transfers.server
        for seed, send in enumerate(
            (
                lambda: peer_of(engine)._socket.send(malformed),
                lambda: server._socket.send_multipart([*server._hello_s, malformed]),
            )
        ):
            await send()
            await wait_until(lambda seed=seed: len(errors) > seed and peer_of(engine).is_ready)
            assert await generate(engine, make_prompt(seed)) == oracle(make_prompt(seed), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 2}
        assert len(errors) == 2


async def test_engines_that_differ_are_refused_with_the_reason(secret, oracle, caplog):
    with caplog.at_level(logging.WARNING):
        async with start_pair(secret, decode={"block_size": 32}, awaits_peer=False) as (_, engine):
            await wait_until(lambda: "block_size is 16 here and 32 there" in caplog.text)
            assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
            assert outcomes_of(engine) == {"peer_down": 1}


@pytest.mark.usefixtures("long_silence")
@pytest.mark.parametrize("carrier", CARRIERS)
async def test_corrupted_blocks_are_computed(carrier, secret, oracle, monkeypatch):
    calls = 0

    def corrupt_every_second_call(slots):
        nonlocal calls
        calls += 1
        return [checksum ^ (calls % 2) for checksum in original(slots)]

    original = prefix_server._checksums_of
    monkeypatch.setattr(prefix_server, "_checksums_of", corrupt_every_second_call)
    async with start_pair(secret, transfer_carrier=carrier, max_num_batched_tokens=40) as (prefill, engine):
        for seed in range(6):
            assert await generate(engine, make_prompt(seed)) == oracle(make_prompt(seed), ANSWER_LEN)
        assert set(outcomes_of(engine)) <= {"fetched", "partly", "nothing"}
        assert engine.stats.fetched_tokens < 6 * FETCHED_TOKENS
        await check_idle(prefill, engine)


async def test_entries_larger_than_a_message_are_computed(secret, oracle, monkeypatch, caplog):
    monkeypatch.setattr("nanovllm_core.transfer.carriers.MAX_MESSAGE_BYTES", 1)
    async with start_pair(secret, awaits_peer=False, transfer_carrier="tcp") as (_, engine):
        await wait_until(lambda: "tcp: a KV block or state has" in caplog.text)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"peer_down": 1}


@pytest.mark.usefixtures("long_silence")
async def test_a_silent_peer_delays_no_answer_for_long(secret, oracle, monkeypatch):
    async with start_pair(secret) as (prefill, engine):
        monkeypatch.setattr(prefix_server.PrefixServer, "_send", lambda *_, **__: None)
        begin_s = time.monotonic()
        assert await generate_with_lost_fetch(engine, make_prompt(0), monkeypatch) == oracle(make_prompt(0), ANSWER_LEN)
        assert time.monotonic() - begin_s < MAX_DELAY_S
        assert outcomes_of(engine) == {"lost": 1}
        monkeypatch.undo()
        await check_idle(prefill, engine)


@pytest.mark.usefixtures("long_silence")
async def test_a_fetch_that_takes_too_long_is_given_up(secret, oracle, monkeypatch):
    monkeypatch.setattr("nanovllm_core.transfer.fetches.MAX_DELAY_S", 0.3)
    monkeypatch.setattr(LeaseTable, "_take_ready", lambda *_: [])
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"too_slow": 1}
        await check_idle(prefill, engine)


async def test_leases_end_without_their_client(secret, monkeypatch):
    allow_long_silence(monkeypatch)
    monkeypatch.setattr(prefix_server, "LEASE_S", 12.0)
    monkeypatch.setattr(prefix_server, "CLIENT_TIMEOUT_S", math.inf)
    received: list[ReadyEntry] = []
    monkeypatch.setattr(PeerConnection, "_start_copies", lambda _, message, __: received.extend(message.entries))
    async with start_pair(secret) as (prefill, engine):
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: prefill.stats.num_held_host_slots > 0 and prefill.stats.num_leases == 1)
        # A message to a client that has disconnected would end the lease, so wait for the last message.
        await wait_until(lambda: len(received) == FETCHED_TOKENS // BLOCK_SIZE)
        await wait_until(lambda: all(fetch.num_sent is not None for fetch in peer_of(engine)._fetches.values()))
        # The next Hello shortens the lease.
        monkeypatch.setattr(prefix_server, "LEASE_S", 1.0)
        leases = prefill._loop._transfers.server._lease_by_number
        await wait_until(lambda: all(lease.expiry_s < time.monotonic() + 1 for lease in leases.values()))
        await engine.stop()
        with contextlib.suppress(Exception):
            await task
        await check_idle(prefill)


async def test_no_entry_is_sent_whose_lease_ended_before_its_checksum_was_computed(secret, oracle, monkeypatch):
    """After the lease, the slot may hold another block with a fitting checksum."""
    original = prefix_server._checksums_of

    def overwrite(slots):
        server = prefill._loop._transfers.server
        # Simulate a server process that was suspended for longer than the lease.
        for lease in server._lease_by_number.values():
            lease.expiry_s = 0.0
        end_s = time.monotonic() + MAX_DELAY_S
        while server._lease_by_number and time.monotonic() < end_s:
            time.sleep(0.01)
        for slot in slots:
            slot[:] = bytes(len(slot))
        return original(slots)

    for module, name in ((fetches, "MAX_DELAY_S"), (prefix_client, "SILENCE_S")):
        monkeypatch.setattr(module, name, MAX_SILENCE_S)
    monkeypatch.setattr(prefix_server, "_checksums_of", overwrite)
    monkeypatch.setattr(prefix_server.PrefixServer, "_welcome", keep_expiries(prefix_server.PrefixServer._welcome))
    async with start_pair(secret) as (prefill, engine):
        assert await generate_with_lost_fetch(engine, make_prompt(0), monkeypatch) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"lost": 1}
        await check_idle(prefill, engine)


def keep_expiries(welcome: Callable[..., None]) -> Callable[..., None]:
    """Without keys, `_welcome` extends no lease."""
    return lambda server, client, hello: welcome(server, client, msgspec.structs.replace(hello, keys=[]))


@pytest.mark.usefixtures("long_silence")
async def test_an_aborted_request_ends_its_fetch(secret, oracle, monkeypatch):
    original = PeerConnection._start_copies
    monkeypatch.setattr(PeerConnection, "_start_copies", lambda *_: None)
    async with start_pair(secret) as (prefill, engine):
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: prefill.stats.num_leases == 1)
        task.cancel()
        await check_idle(prefill, engine)
        assert outcomes_of(engine) == {"aborted": 1}
        monkeypatch.setattr(PeerConnection, "_start_copies", original)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)


@pytest.mark.usefixtures("long_silence")
async def test_a_request_that_is_aborted_when_its_fetch_has_ended_does_not_run(secret, monkeypatch):
    async with start_pair(secret) as (_, engine):
        transfers = engine._loop._transfers
        original = transfers._finish

        def finish_after_abort(fetch):
            transfers.abort(fetch.request.key)
            original(fetch)

        monkeypatch.setattr(transfers, "_finish", finish_after_abort)
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: outcomes_of(engine) == {"fetched": 1})
        task.cancel()
        await check_idle(engine)
        assert engine.stats.num_steps == engine.stats.prompt_tokens == 0


@pytest.mark.usefixtures("long_silence")
async def test_a_copy_that_ends_after_its_fetch_keeps_its_slots(secret, oracle, monkeypatch):
    original = prefix_client._copy_entries
    copies_may_end = threading.Event()

    def copy_after_the_fetch(*arguments):
        monkeypatch.setattr(fetches, "MAX_DELAY_S", -math.inf)
        assert copies_may_end.wait(timeout=60)
        return original(*arguments)

    monkeypatch.setattr(prefix_client, "_copy_entries", copy_after_the_fetch)
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"too_slow": 1}
        assert engine.stats.num_held_host_slots > 0
        copies_may_end.set()
        await check_idle(prefill, engine)


@pytest.mark.usefixtures("long_silence")
async def test_a_read_that_never_completes_ends_without_freeing_its_slots(secret, oracle, monkeypatch):
    start_copies = PeerConnection._start_copies
    stuck_fetches: list[PrefixFetch] = []
    stuck_handles: list[object] = []
    has_fetch_ended = threading.Event()

    def start_with_short_limit(peer, message, payloads):
        monkeypatch.setattr(fetches, "MAX_DELAY_S", 0.0)
        stuck_fetches.append(peer._fetches[message.key].fetch)
        monkeypatch.setattr(PeerConnection, "_start_copies", start_copies)
        start_copies(peer, message, payloads)

    monkeypatch.setattr("nanovllm_core.transfer.transfers.NUM_COPY_THREADS", 1)
    monkeypatch.setattr("nanovllm_core.transfer.nixl.MAX_READ_S", 2.0)
    monkeypatch.setattr(PeerConnection, "_start_copies", start_with_short_limit)
    async with start_pair(secret, transfer_carrier="nixl") as (prefill, engine):
        agent = peer_of(engine)._agent._agent
        start_read, check_state = agent.transfer, agent.check_xfer_state

        def start_no_read(handle):
            stuck_handles.append(handle)
            monkeypatch.setattr(agent, "transfer", start_read)
            return "PROC"

        def check_after_the_fetch(handle):
            assert has_fetch_ended.wait(timeout=60)
            return "PROC" if handle in stuck_handles else check_state(handle)

        monkeypatch.setattr(agent, "transfer", start_no_read)
        monkeypatch.setattr(agent, "check_xfer_state", check_after_the_fetch)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        has_fetch_ended.set()
        monkeypatch.setattr(fetches, "MAX_DELAY_S", MAX_DELAY_S)
        # The read ends. The peer is not used again, so that no more slots are lost.
        await wait_until(lambda: not peer_of(engine).is_ready)
        assert await generate(engine, make_prompt(1)) == oracle(make_prompt(1), ANSWER_LEN)
        assert outcomes_of(engine) == {"too_slow": 1, "peer_down": 1}
        num_lost = len(stuck_fetches[0].late_positions)
        assert num_lost > 0
        await wait_until(lambda: engine.stats.num_held_host_slots == num_lost)
        await check_idle(prefill)


async def test_prompts_are_computed_as_long_as_the_host_memory_is_not_ready(secret, oracle, monkeypatch):
    monkeypatch.setattr(HostTier, "is_ready", False)
    async with start_pair(secret) as (_, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"no_space": 1}


@pytest.mark.parametrize("tokens", [[6, toy_model.VOCAB], [6, -1], [], [6] * toy_model.LONGEST], ids=len)
async def test_invalid_prompts_of_other_engines_are_not_computed(tokens, secret, oracle):
    fetch = Fetch(1, [(EntryKind.BLOCK, bytes(32))], np.array(tokens, np.int32).tobytes(), "", 0, "tcp")
    async with start_pair(secret) as (prefill, engine):
        transfers = prefill._loop._transfers
        opened = threading.Event()
        transfers._run_on_engine_thread(lambda: (transfers._leases.open(10**6, fetch), opened.set()))
        await wait_until(opened.is_set)
        await check_idle(prefill)
        assert prefill.stats.num_steps == 0
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)


async def test_a_reset_reaches_a_prefill_engine_that_did_not_answer(secret, oracle):
    async with start_pair(secret) as (prefill, engine):
        await generate(engine, make_prompt(0))
        peer_of(engine)._mark_down("a network failure")
        await engine.reset_prefix_cache()
        await wait_until(lambda: peer_of(engine).is_ready)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert prefill.stats.num_cached_prompt_tokens == 0
