import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest
import torch
import toy_model
from sampled_answers import PROMPTS, SAMPLINGS, answer_all, collect, compare_answers, tokens_of
from torch import distributed

from nanovllm_core import (
    AsyncEngine,
    ConfigError,
    EngineClient,
    EngineConfig,
    EngineDeadError,
    Request,
    RequestOutput,
    SamplingParams,
)
from nanovllm_core.config_resolution import resolve
from nanovllm_core.engine import ranks
from nanovllm_core.engine.ranks import RankProcesses

pytestmark = pytest.mark.background

CONFIG = EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4, tensor_parallel_size=2)
LIMITS = {"max_model_len": 128, "max_num_batched_tokens": 48}
RESOLVED = resolve(CONFIG, max_position=toy_model.LONGEST, model_dtype=torch.float32, has_cuda=False)
MAX_START_S, MAX_END_S = 500, 60
# Requests that do not end within a test.
LONG_CONFIG = replace(CONFIG, num_blocks=3 * toy_model.LONG_CONTEXT // 16)
LONG_SAMPLING = SamplingParams(temperature=0, max_tokens=toy_model.LONG_CONTEXT - 2, ignore_eos=True)


@pytest.fixture
def long_wait_for_reports(monkeypatch) -> None:
    """The report of a failed rank may come late on a busy machine."""
    monkeypatch.setattr(ranks, "REPORT_TIMEOUT_S", 60.0)


@pytest.fixture(scope="module")
def expected(vetter) -> dict[str, list[RequestOutput]]:
    with pytest.MonkeyPatch.context() as patch:
        vetter.use(patch)
        return asyncio.run(answer_all(replace(CONFIG, tensor_parallel_size=1, depth=1, **LIMITS), PROMPTS))


# There are too few blocks for all requests, so the scheduler preempts some.
@pytest.mark.parametrize(("num_blocks", "dp_attention", "depth"), [(18, False, 1), (9, True, 2)])
def test_two_ranks_answer_like_one_rank_with_every_sampling_option(
    num_blocks, dp_attention, depth, expected, vetter, monkeypatch
):
    vetter.use(monkeypatch)
    config = replace(CONFIG, num_blocks=num_blocks, dp_attention=dp_attention, depth=depth, **LIMITS)
    compare_answers(asyncio.run(answer_all(config, PROMPTS)), expected)


def test_requests_get_their_own_log_probabilities_with_dp_attention():
    # With as many requests as a step may have, no row is padding. All rows are for requests with log-probabilities.
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=2)

    async def run(config: EngineConfig) -> list[list[RequestOutput]]:
        engine = await AsyncEngine.start(toy_model.toy_spec(), config)
        try:
            prompts = (list(range(10 + index, 14 + 3 * index)) for index in range(config.max_num_seqs))
            return await asyncio.gather(*(collect(engine, prompt, sampling, str(prompt)) for prompt in prompts))
        finally:
            await engine.stop()

    expected = asyncio.run(run(replace(CONFIG, tensor_parallel_size=1)))
    found = asyncio.run(run(replace(CONFIG, dp_attention=True)))
    compare_answers(dict(enumerate(found)), dict(enumerate(expected)))


def test_a_failed_start_leaves_no_process_group():
    async def run() -> None:
        with pytest.raises(ConfigError, match="kv_offload_gib is 1e-06, but must be at least"):
            await AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, kv_offload_gib=1e-6))
        await (await AsyncEngine.start(toy_model.toy_spec(), CONFIG)).stop()

    asyncio.run(run())


def test_a_config_error_of_all_ranks_is_raised_and_not_printed(capfd):
    with pytest.raises(ConfigError, match="num_key_value_heads is 2, which 3 ranks can't share evenly"):
        asyncio.run(EngineClient.launch(toy_model.toy_spec(), replace(CONFIG, tensor_parallel_size=3)))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("closes", [False, True])
def test_no_rank_ends_before_rank_0_has_connected(closes, monkeypatch):
    # Each rank refuses the model just after it has joined.
    processes = RankProcesses(toy_model.toy_spec(), replace(RESOLVED, tensor_parallel_size=3), None)
    connect, close_thread, states = distributed.init_process_group, threading.Thread(target=processes.close), []

    def connect_slowly(*arguments, **options):
        connect(*arguments, **options)
        if closes:
            close_thread.start()
        time.sleep(2)
        states.append((processes.has_failed, all(process.is_alive() for process in processes._processes)))

    monkeypatch.setattr(distributed, "init_process_group", connect_slowly)
    try:
        with pytest.raises(ValueError, match="num_key_value_heads is 2, which 3 ranks can't share evenly"):
            processes.start_rank_0(toy_model.toy_spec())
    finally:
        processes.close()
    assert states == [(False, True)]


def test_closing_does_not_wait_for_the_join_after_a_failure(monkeypatch):
    monkeypatch.setattr(ranks, "FAILED_START_TIMEOUT_S", 120.0)
    processes = RankProcesses(toy_model.toy_spec(), RESOLVED, None)
    processes._processes[0].kill()
    assert processes._failure_event.wait(MAX_END_S)
    start_s = time.monotonic()
    with processes._join_lock:
        processes.close()
    assert time.monotonic() - start_s < MAX_END_S


def test_a_rank_that_can_not_build_the_model_fails_the_start_with_its_reason():
    with pytest.raises(ValueError, match="this model can't be built"):
        asyncio.run(AsyncEngine.start(toy_model.toy_spec("refusing"), CONFIG))


def test_settings_that_ranks_can_not_share_are_refused():
    with pytest.raises(ValueError, match="num_key_value_heads is 2, which 3 ranks can't share evenly"):
        asyncio.run(AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, tensor_parallel_size=3)))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 0, but must be 1\.\.16"):
        asyncio.run(AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, tensor_parallel_size=0)))
    with pytest.raises(ConfigError, match="expert_parallel is True, but must be False if tensor_parallel_size is 1"):
        asyncio.run(AsyncEngine.start(toy_model.toy_spec(), EngineConfig(device="cpu", expert_parallel=True)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 1}, "dp_attention is True, but must be False if tensor_parallel_size is 1"),
        ({"max_num_seqs": 5}, r"max_num_seqs is 5, but must be a multiple of tensor_parallel_size \(2\)"),
        ({"check_ranks": True}, "check_ranks is True, but must be False with dp_attention"),
        (
            {"max_num_batched_tokens": 35},
            r"tokens is 35, but must be at least max_num_seqs \+ tensor_parallel_size \* block_size = 36",
        ),
    ],
)
def test_settings_that_do_not_fit_dp_attention_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        asyncio.run(AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, dp_attention=True, **settings)))


def test_default_number_of_requests_is_a_multiple_of_the_ranks():
    config = EngineConfig(device="cpu", tensor_parallel_size=3, dp_attention=True)
    resolved = resolve(config, max_position=100, model_dtype=torch.float32, has_cuda=False)
    assert (resolved.max_num_seqs, resolved.max_seqs_per_group) == (63, 21)


def test_next_turns_find_the_blocks_of_short_prompts_on_every_rank():
    async def run() -> None:
        engine = await AsyncEngine.start(toy_model.toy_spec(), replace(CONFIG, dp_attention=True))
        # The prompts are shorter than a block, and start at the same time on different ranks.
        prompts = [[2 + index] * 10 for index in range(2)]
        sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
        answers = await asyncio.gather(*(collect(engine, prompt, sampling, str(prompt)) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            (output,) = await collect(engine, prompt + tokens_of(answer), SamplingParams(max_tokens=1), "next")
            assert output.num_cached_tokens >= 64
        await engine.stop()

    asyncio.run(run())


def test_check_of_ranks_finds_different_hidden_states():
    async def run() -> None:
        spec = toy_model.toy_spec("disagreeing")
        engine = await AsyncEngine.start(spec, replace(CONFIG, check_ranks=True))
        assert tokens_of(await collect(engine, [1, 2, 3], SAMPLINGS["allowed"], "r"))
        with pytest.raises(EngineDeadError, match="the ranks have different hidden states after step"):
            await collect(engine, [toy_model.DisagreeingLM.TRIGGER, 1], SAMPLINGS["allowed"], "s")
        await engine.stop()

    asyncio.run(run())


@pytest.mark.usefixtures("long_wait_for_reports")
def test_a_killed_rank_fails_open_requests_and_the_engine_in_this_process():
    async def run() -> None:
        engine = await AsyncEngine.start(toy_model.toy_spec("long"), LONG_CONFIG)
        stream = engine.generate(Request("r", [1, 2], LONG_SAMPLING))
        await anext(stream)
        (process,) = engine._loop._ranks._processes
        os.kill(process.pid, signal.SIGKILL)
        start_s = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1 has ended \(exit code -9\)"):
            async for _ in stream:
                pass
        assert time.monotonic() - start_s < MAX_END_S
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(Request("s", [1], LONG_SAMPLING)))
        await engine.stop()

    asyncio.run(run())
    assert asyncio.run(answer_greedily(CONFIG)) == asyncio.run(answer_greedily(replace(CONFIG, tensor_parallel_size=1)))


def test_a_stopped_rank_fails_open_requests_and_ends(monkeypatch):
    async def run() -> None:
        engine = await AsyncEngine.start(toy_model.toy_spec("long"), LONG_CONFIG)
        stream = engine.generate(Request("r", [1, 2], LONG_SAMPLING))
        await anext(stream)
        monkeypatch.setattr("nanovllm_core.engine.loop.STEP_TIMEOUT_S", 0.5)
        (process,) = engine._loop._ranks._processes
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="a step has not ended within 0.5 s"):
            async for _ in stream:
                pass
        # Another thread may be reaping the process, so `exitcode` may not be set yet.
        assert connection.wait([process.sentinel], MAX_END_S)
        await engine.stop()

    asyncio.run(run())


@pytest.mark.usefixtures("long_wait_for_reports")
def test_a_rank_that_fails_in_a_step_ends_the_engine_with_its_error():
    async def run() -> None:
        engine = await AsyncEngine.start(toy_model.toy_spec("failing rank"), CONFIG)
        with pytest.raises(EngineDeadError, match="rank 1 failed: ValueError: a wrong value"):
            await collect(engine, [toy_model.FailingRankLM.TRIGGER, 1], SAMPLINGS["greedy"], "r")
        await engine.stop()

    asyncio.run(run())


@pytest.mark.usefixtures("long_wait_for_reports")
def test_a_rank_that_is_killed_after_the_stop_message_has_failed():
    processes = RankProcesses(toy_model.toy_spec(), RESOLVED, None)
    try:
        processes._is_stop_sent = True
        processes._processes[0].kill()
        with pytest.raises(EngineDeadError, match=r"rank 1 has ended \(exit code -9\)"):
            processes.wait_for_failure()
    finally:
        processes.close()


def test_no_rank_remains_if_another_rank_can_not_be_started(monkeypatch):
    started = []
    original = SpawnProcess.start

    def start(process):
        if started:
            raise OSError("no more processes")
        original(process)
        started.append(process)

    monkeypatch.setattr(SpawnProcess, "start", start)
    with pytest.raises(OSError, match="no more processes"):
        RankProcesses(toy_model.toy_spec(), replace(RESOLVED, tensor_parallel_size=3), None)
    assert started[0].exitcode == -signal.SIGKILL


def test_a_stopped_start_leaves_no_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)

    async def run() -> None:
        start_task = asyncio.create_task(EngineClient.launch(toy_model.toy_spec(), CONFIG))
        async with asyncio.timeout(MAX_START_S):
            while not any(tmp_path.rglob("nanovllm-ranks-*")):
                assert not start_task.done()
                await asyncio.sleep(0.01)
        start_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start_task
        assert not any(tmp_path.glob("nanovllm-*"))

    asyncio.run(run())


def test_a_program_whose_ranks_can_not_start_ends_with_their_error(tmp_path):
    # Each rank imports the program, which lacks `if __name__ == "__main__":` and so starts an engine again.
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, toy_model\n"
        "from nanovllm_core import AsyncEngine, EngineConfig\n"
        "config = EngineConfig(device='cpu', num_blocks=64, tensor_parallel_size=2)\n"
        "asyncio.run(AsyncEngine.start(toy_model.toy_spec(), config))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(toy_model.__file__).parent)}
    result = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=MAX_START_S, check=False
    )
    assert result.returncode == 1
    assert "EngineDeadError: rank 1 has ended (exit code 1)" in result.stderr


async def answer_greedily(config: EngineConfig) -> list[int]:
    engine = await AsyncEngine.start(toy_model.toy_spec(), config)
    try:
        return tokens_of(await collect(engine, PROMPTS[0], SAMPLINGS["greedy"], "r"))
    finally:
        await engine.stop()


@pytest.mark.parametrize("victim", ["rank", "engine"])
def test_a_killed_process_ends_the_engine_and_all_of_its_processes(victim):
    async def run() -> None:
        engine = await EngineClient.launch(toy_model.toy_spec("long"), LONG_CONFIG)
        streams = [engine.generate(Request(f"r{index}", [index, 2], LONG_SAMPLING)) for index in range(3)]
        for stream in streams:
            await anext(stream)
        engine_pid = engine._owned_process.pid
        rank_pids = child_pids(engine_pid)
        assert rank_pids
        os.kill(rank_pids[0] if victim == "rank" else engine_pid, signal.SIGKILL)
        start_s = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="rank 1 has ended" if victim == "rank" else "process died"):
                async for _ in stream:
                    pass
        assert time.monotonic() - start_s < MAX_END_S
        await engine.stop()
        deadline_s = time.monotonic() + MAX_END_S
        while any(map(is_running, [engine_pid, *rank_pids])):
            assert time.monotonic() < deadline_s, "a process of the engine is still running"
            await asyncio.sleep(0.05)

    asyncio.run(run())


def child_pids(pid: int) -> list[int]:
    """The children of `pid` that multiprocessing has started with "spawn"."""
    process_dirs = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [
        int(path.name)
        for path in process_dirs
        if (fields := read_stat(path)) and int(fields[1]) == pid and "spawn_main" in read_command(path)
    ]


def is_running(pid: int) -> bool:
    fields = read_stat(Path(f"/proc/{pid}"))
    return bool(fields) and fields[0] != "Z"


def read_stat(process_dir: Path) -> list[str]:
    """Fields of /proc/PID/stat from the process state on; empty if the process has ended."""
    try:
        return (process_dir / "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def read_command(process_dir: Path) -> str:
    try:
        return (process_dir / "cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
