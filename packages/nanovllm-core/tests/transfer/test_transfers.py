"""Tests a decode engine that fetches the blocks of prompts from a prefill engine."""

import asyncio
import contextlib
import json
import logging
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import toy_model
import zmq.asyncio
from summing_model import continue_sum, summing_spec
from toy_recurrent import Oracle, recurrent_spec

from nanovllm_core import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    GrammarSpec,
    ModelSpec,
    Request,
    RequestError,
    SamplingParams,
)
from nanovllm_core.cache.copy_time import CopyTimeModel
from nanovllm_core.cache.host_memory import EntryKind
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.engine.trace import TRACK_IDS
from nanovllm_core.transfer import leases, prefix_client, prefix_server
from nanovllm_core.transfer.fetch_times import FetchTimes
from nanovllm_core.transfer.fetches import FetchOutcome
from nanovllm_core.transfer.messages import Fetch, FetchEnd
from nanovllm_core.transfer.prefix_client import PeerConnection

pytestmark = pytest.mark.background

CONFIG = EngineConfig(device="cpu", num_blocks=60, max_num_seqs=4, kv_offload_gib=0.01)
PROMPT_LEN, ANSWER_LEN, BLOCK_SIZE = 100, 6, 16
FETCHED_TOKENS = PROMPT_LEN // BLOCK_SIZE * BLOCK_SIZE
MAX_WAIT_S = 20.0
SLOW_PROMPT_S = 10.0
CARRIERS = ["shm", "tcp", "nixl"] if sys.platform == "linux" else ["tcp"]


@pytest.fixture(autouse=True)
def always_fetch(monkeypatch):
    """A toy model computes faster than it fetches, so override the predictions."""
    monkeypatch.setattr(CopyTimeModel, "predict", lambda *_: 0.0)
    monkeypatch.setattr(FetchTimes, "is_worthwhile", lambda *_: True)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return write_secret(tmp_path / "secret")


@pytest.fixture(scope="module")
def oracle() -> Callable[[list[int], int], list[int]]:
    return toy_model.make_oracle()


def write_secret(path: Path) -> Path:
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def with_fingerprint(spec: ModelSpec, name: str = "toy") -> ModelSpec:
    draft = None if spec.draft is None else with_fingerprint(spec.draft, name)
    return replace(spec, fingerprint=name, draft=draft)


def make_prompt(seed: int, length: int = PROMPT_LEN) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(6, 97) for _ in range(length)]


async def generate(
    engine: AsyncEngine, prompt: list[int], count: int = ANSWER_LEN, grammar: GrammarSpec | None = None, **fields
) -> list[int]:
    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, grammar=grammar)
    request = Request(f"r{random.random()}", prompt, sampling, **fields)
    return [token async for output in engine.generate(request) for token in output.new_token_ids]


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + MAX_WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.005)


def peer_of(engine: AsyncEngine) -> PeerConnection:
    (peer,) = engine._loop._transfers._peers.values()
    return peer


def outcomes_of(engine: AsyncEngine) -> dict[str, int]:
    return {outcome: count for outcome, count in engine.stats.fetches if count}


async def check_idle(*engines: AsyncEngine) -> None:
    for engine in engines:
        await wait_until(
            lambda engine=engine: (
                engine.stats.num_free_blocks == engine.stats.num_blocks
                and engine.stats.num_held_host_slots == engine.stats.num_leases == 0
            )
        )


@contextlib.asynccontextmanager
async def start_pair(
    secret: Path, spec: ModelSpec | None = None, *, decode: dict | None = None, awaits_peer: bool = True, **settings
) -> AsyncIterator[tuple[AsyncEngine, AsyncEngine]]:
    """Yields (prefill engine, decode engine). decode: settings of the decode engine only."""
    spec = with_fingerprint(spec or toy_model.toy_spec())
    config = replace(CONFIG, transfer_secret_file=secret, **settings)
    prefill = await AsyncEngine.start(spec, replace(config, transfer_listen="127.0.0.1:0"))
    address = prefill.info.transfer_address
    config = replace(config, **{"transfer_peers": (address,), "prefill_peer": address} | (decode or {}))
    engine = await AsyncEngine.start(spec, config)
    try:
        if awaits_peer:
            await wait_until(lambda: peer_of(engine).is_ready)
        yield prefill, engine
    finally:
        await engine.stop()
        await prefill.stop()


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


async def test_idle_engines_with_nixl_take_no_processor_time(secret, oracle):
    async with start_pair(secret, transfer_carrier="nixl") as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        await check_idle(prefill, engine)
        await wait_until(lambda: not prefill._loop._transfers.server._is_serving_reads)
        begin_s = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - begin_s < 0.4  # a busy thread per engine would take 1 s


async def test_entries_larger_than_a_message_are_computed(secret, oracle, monkeypatch, caplog):
    monkeypatch.setattr("nanovllm_core.transfer.carriers.MAX_MESSAGE_BYTES", 1)
    async with start_pair(secret, awaits_peer=False, transfer_carrier="tcp") as (_, engine):
        await wait_until(lambda: "tcp: a KV block or state has" in caplog.text)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"peer_down": 1}


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


async def test_the_decode_engine_computes_if_the_peer_is_down(secret, oracle, monkeypatch):
    observed: list[tuple[int, float, float]] = []
    monkeypatch.setattr(FetchTimes, "observe", lambda _, *times: observed.append(times))
    async with start_pair(secret) as (prefill, engine):
        engine._loop._scheduler.tier.predict_compute = lambda *_: SLOW_PROMPT_S
        await prefill.stop()
        prompts = [make_prompt(seed) for seed in range(2)]
        begin_s = time.monotonic()
        assert await generate(engine, prompts[0]) == oracle(prompts[0], ANSWER_LEN)
        assert time.monotonic() - begin_s < 5
        await wait_until(lambda: not peer_of(engine).is_ready)
        assert await generate(engine, prompts[1]) == oracle(prompts[1], ANSWER_LEN)
        assert outcomes_of(engine) == {"lost": 1, "peer_down": 1}
        # `fetch_s` covers the wait for the peer and the computation.
        ((num_tokens, fetch_s, compute_s),) = observed
        assert (num_tokens, compute_s) == (FETCHED_TOKENS, SLOW_PROMPT_S)
        assert fetch_s > 1.5 + SLOW_PROMPT_S
        await check_idle(engine)


async def test_a_restarted_peer_is_used_again(secret, oracle, tmp_path):
    address = f"ipc://{tmp_path}/transfer"
    spec, config = with_fingerprint(toy_model.toy_spec()), replace(CONFIG, transfer_secret_file=secret)
    engine = await AsyncEngine.start(spec, replace(config, transfer_peers=(address,), prefill_peer=address))
    try:
        for seed in range(2):
            prefill = await AsyncEngine.start(spec, replace(config, transfer_listen=address))
            await wait_until(lambda: peer_of(engine).is_ready)
            assert await generate(engine, make_prompt(seed)) == oracle(make_prompt(seed), ANSWER_LEN)
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


async def test_a_connection_without_keys_is_ignored(secret, oracle):
    async with start_pair(secret) as (prefill, engine):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(f"tcp://{prefill.info.transfer_address}")
            await socket.send(b"\x80")
            assert not await socket.poll(500)
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"fetched": 1}


async def test_engines_that_differ_are_refused_with_the_reason(secret, oracle, caplog):
    with caplog.at_level(logging.WARNING):
        async with start_pair(secret, decode={"block_size": 32}, awaits_peer=False) as (_, engine):
            await wait_until(lambda: "block_size is 16 here and 32 there" in caplog.text)
            assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
            assert outcomes_of(engine) == {"peer_down": 1}


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


async def test_a_silent_peer_delays_no_answer_for_long(secret, oracle, monkeypatch):
    async with start_pair(secret) as (prefill, engine):
        monkeypatch.setattr(prefix_server.PrefixServer, "_send", lambda *_, **__: None)
        begin_s = time.monotonic()
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert time.monotonic() - begin_s < 5
        assert outcomes_of(engine) == {"lost": 1}
        monkeypatch.undo()
        await check_idle(prefill, engine)


async def test_a_fetch_that_takes_too_long_is_given_up(secret, oracle, monkeypatch):
    monkeypatch.setattr("nanovllm_core.transfer.fetches.MAX_DELAY_S", 0.3)
    monkeypatch.setattr(leases.LeaseTable, "_take_ready", lambda *_: ([], []))
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"too_slow": 1}
        await check_idle(prefill, engine)


async def test_leases_end_without_their_client(secret, monkeypatch):
    monkeypatch.setattr(PeerConnection, "_start_copies", lambda *_: None)
    async with start_pair(secret) as (prefill, engine):
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: prefill.stats.num_held_host_slots > 0 and prefill.stats.num_leases == 1)
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
        time.sleep(prefix_server.LEASE_S / 2)
        for slot in slots:
            slot[:] = bytes(len(slot))
        return original(slots)

    monkeypatch.setattr(prefix_server, "_checksums_of", overwrite)
    monkeypatch.setattr(prefix_server.PrefixServer, "_welcome", keep_expiries(prefix_server.PrefixServer._welcome))
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"lost": 1}
        await check_idle(prefill, engine)


def keep_expiries(welcome: Callable[..., None]) -> Callable[..., None]:
    """Without keys, `_welcome` extends no lease."""
    return lambda server, client, hello: welcome(server, client, msgspec.structs.replace(hello, keys=[]))


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


async def test_a_copy_that_ends_after_its_fetch_keeps_its_slots(secret, oracle, monkeypatch):
    original = prefix_client._copy_entries

    def copy_slowly(*arguments):
        time.sleep(0.6)
        return original(*arguments)

    monkeypatch.setattr("nanovllm_core.transfer.fetches.MAX_DELAY_S", 0.2)
    monkeypatch.setattr(prefix_client, "_copy_entries", copy_slowly)
    async with start_pair(secret) as (prefill, engine):
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert outcomes_of(engine) == {"too_slow": 1}
        assert engine.stats.num_held_host_slots > 0
        await check_idle(prefill, engine)


async def test_prompts_are_computed_as_long_as_the_host_memory_is_not_ready(secret, oracle, monkeypatch):
    monkeypatch.setattr(HostTier, "is_ready", False)
    async with start_pair(secret) as (_, engine):
        begin_s = time.monotonic()
        assert await generate(engine, make_prompt(0)) == oracle(make_prompt(0), ANSWER_LEN)
        assert time.monotonic() - begin_s < 2
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

    def copy_slowly(*arguments):
        time.sleep(0.3)
        return original(*arguments)

    monkeypatch.setattr(prefix_client, "_copy_entries", copy_slowly)
    monkeypatch.setattr(PeerConnection, "reset_prefix_cache", lambda _: None)
    async with start_pair(secret) as (prefill, engine):
        task = asyncio.create_task(generate(engine, make_prompt(0)))
        await wait_until(lambda: prefill.stats.num_leases == 1)
        await engine.reset_prefix_cache()
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
    with pytest.raises(ConfigError, match="transfer_listen is 192.0.2.1:1, where the engine can't listen"):
        await AsyncEngine.start(spec, replace(config, transfer_secret_file=secret, transfer_listen="192.0.2.1:1"))
    with pytest.raises(ConfigError, match="need a model with a fingerprint"):
        await AsyncEngine.start(toy_model.toy_spec(), replace(config, transfer_secret_file=secret))
