import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import parents
import pytest

from nanovllm_core.engine.private_directory import remove_private_directory


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        # There is no /proc (not Linux), or the process has just ended.
        return not Path("/proc").exists()


ONLY_ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="uses prctl")


@pytest.mark.parametrize(
    ("phase", "is_stopped"),
    [
        ("loading", False),
        ("starting ranks", False),
        ("serving", False),
        pytest.param("serving", True, marks=ONLY_ON_LINUX),
    ],
)
def test_the_engine_ends_at_once_when_its_parent_is_killed(phase, is_stopped, tmp_path):
    begun, temporary_directory = tmp_path / "begun", tmp_path / "t"
    temporary_directory.mkdir()
    script = Path(parents.__file__)
    env = os.environ | {"TMPDIR": str(temporary_directory), "PYTHONPATH": str(script.parent)}
    command = [sys.executable, str(script), phase, str(begun)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        deadline = time.monotonic() + 120
        while not begun.exists():
            assert parent.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert is_alive(pid)
        assert list(temporary_directory.glob("nanovllm-*"))
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    killed_s = time.monotonic()
    while is_alive(pid):
        assert time.monotonic() - killed_s < 60
        time.sleep(0.02)
    assert not list(temporary_directory.glob("nanovllm-*"))


def test_a_program_that_does_not_stop_its_engine_ends(tmp_path):
    program = (
        "import asyncio, parents\n"
        "from nanovllm_core import EngineClient, EngineProcess\n"
        "engine = asyncio.run(EngineClient.adopt(EngineProcess(parents.load_quickly)))\n"
    )
    env = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(parents.__file__).parent)}
    subprocess.run([sys.executable, "-c", program], env=env, timeout=120, check=True)
    assert not list(tmp_path.glob("nanovllm-*"))


def test_an_engine_that_is_killed_while_it_loads_leaves_no_semaphore(tmp_path):
    program = (
        "import pathlib, sys, time, parents\n"
        "from functools import partial\n"
        "from nanovllm_core import EngineProcess\n"
        "begun = pathlib.Path(sys.argv[1])\n"
        "engine = EngineProcess(partial(parents.load_slowly, begun))\n"
        "while not begun.exists():\n"
        "    time.sleep(0.01)\n"
        "engine.kill()\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(parents.__file__).parent)}
    command = [sys.executable, "-c", program, tmp_path / "begun"]
    result = subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=120, check=True)
    assert result.stderr == b""  # multiprocessing warns of semaphores that are left


def test_a_rank_that_is_killed_leaves_no_semaphore():
    program = (
        "import asyncio, contextlib, multiprocessing, parents\n"
        "from dataclasses import replace\n"
        "from nanovllm_core import AsyncEngine, EngineDeadError\n"
        "async def run():\n"
        "    spec, config = parents.load_quickly(num_ranks=2)\n"
        "    spec = replace(spec, build=parents.build_with_progress_bar)\n"
        "    engine = await AsyncEngine.start(spec, config)\n"
        "    (rank,) = multiprocessing.active_children()\n"
        "    rank.kill()\n"
        "    with contextlib.suppress(EngineDeadError):\n"
        "        await engine.stop()\n"
        "asyncio.run(run())\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(parents.__file__).parent)}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=env, stderr=subprocess.PIPE, timeout=120, check=True)
    assert b"semaphore" not in result.stderr


@pytest.mark.parametrize("case", ["idle", "serving, with ranks"])
def test_the_engine_ends_when_its_event_loop_is_closed(case, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, sys, parents\n"
        "from nanovllm_core import AsyncEngine, Request, SamplingParams\n"
        "if __name__ == '__main__':\n"
        "    case = sys.argv[1]\n"
        "    event_loop = asyncio.new_event_loop()\n"
        "    start = AsyncEngine.start(*parents.load_quickly(2 if 'ranks' in case else 1))\n"
        "    engine = event_loop.run_until_complete(start)\n"
        "    if 'serving' in case:\n"
        "        stream = engine.generate(Request('r', [1, 2], SamplingParams(max_tokens=200, ignore_eos=True)))\n"
        "        event_loop.run_until_complete(anext(stream))\n"
        "    event_loop.close()\n"
        "    # The engine's thread ends although the program continues.\n"
        "    engine._loop._executor.shutdown()\n"
        "    print('ends')\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(parents.__file__).parent)}
    result = subprocess.run([sys.executable, program, case], env=env, stdout=subprocess.PIPE, timeout=60, check=True)
    assert result.stdout == b"ends\n"


def test_only_the_sockets_own_directory_is_removed(tmp_path):
    own, shared = tmp_path / "own", tmp_path / "shared"
    for directory in (own, shared):
        directory.mkdir()
        (directory / "engine").touch()
        (directory / "nanovllm-ranks-a").mkdir()
        (directory / "nanovllm-ranks-a" / "rendezvous").touch()
    (shared / "other").touch()
    for directory in (own, shared, own):
        remove_private_directory(f"ipc://{directory}/engine")
    assert not own.exists()
    assert [path.name for path in shared.iterdir()] == ["other"]
