"""Tests that threads spin briefly while other processes need the cores, and long again afterwards."""

import itertools
import os
import subprocess
import sys
import threading

import pytest

from nanovllm_kernels import openmp_spinning

# OpenMP reads its environment once, so each measurement needs a process. CPU time during a sleep is spin time.
MEASURE = """
import time, torch
from nanovllm_kernels.openmp_spinning import ShortSpins, can_shorten_spins

assert can_shorten_spins() == EXPECTED
numbers = torch.ones(1 << 22)

def spun():
    used = []
    for _ in range(20):
        numbers.add_(1)
        begin = time.process_time()
        time.sleep(0.02)
        used.append(time.process_time() - begin)
    return sorted(used)

before = spun()
with ShortSpins():
    during = spun()
after = spun()
# Other busy processes make some measurements of long spins too short, and some of short spins too long.
print(before[-1], during[10], after[-1], before[10], after[10])
"""
WATCH = """
import subprocess, sys, time
from nanovllm_kernels.openmp_spinning import SpinControl

spins = SpinControl()
busy_processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(NUM_BUSY_PROCESSES)]
try:
    end = time.monotonic() + 20
    while not spins.is_short and time.monotonic() < end:
        time.sleep(0.05)
    assert spins.is_short
finally:
    for process in busy_processes:
        process.kill()
spins.close()
"""
needs_openmp = pytest.mark.skipif(
    sys.platform != "linux" or (os.cpu_count() or 1) < 2 or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores, and Linux",
)


def measure(**environment: str) -> list[float]:
    """Return CPU seconds of spins: longest before, median while short, longest after, medians before and after."""
    kept = {name: value for name, value in os.environ.items() if name not in openmp_spinning.WAIT_POLICY_VARIABLES}
    expected = str(not environment)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE.replace("EXPECTED", expected)],
        env=kept | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


@needs_openmp
def test_short_spins_use_less_cpu_time():
    before, during, after, *_ = measure()
    assert during < before / 5
    assert during < after / 5


@needs_openmp
@pytest.mark.measures
@pytest.mark.parametrize(("name", "value"), [("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "100")])
def test_wait_policy_of_the_user_is_kept(name, value):
    _, during, _, before, after = measure(**{name: value})
    assert max(before, during, after) < 0.001


@pytest.fixture
def control(monkeypatch):
    """Return a `SpinControl` that takes no samples, and the list of its changes."""
    changes = []

    class Recorded:
        def __init__(self):
            changes.append("short")

        def __exit__(self, *_):
            changes.append("long")

    monkeypatch.setattr(openmp_spinning, "ShortSpins", Recorded)
    monkeypatch.setattr(openmp_spinning.torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(openmp_spinning.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return openmp_spinning.SpinControl(is_on=False), changes


def test_spins_are_short_while_another_process_is_busy(control):
    spins, changes = control
    for cores in (0.0, 0.3, 1.0, 0.9, 0.3, 2.0):
        spins.adapt(cores)
    assert (spins.is_short, changes) == (True, ["short"])
    spins.adapt(0.1)
    spins.adapt(0.1)
    assert (spins.is_short, changes) == (False, ["short", "long"])
    spins.adapt(1.0)
    spins.close()
    spins.close()
    assert changes == ["short", "long"] * 2


def test_other_processes_may_use_idle_cores_without_effect(control, monkeypatch):
    spins, changes = control
    monkeypatch.setattr(openmp_spinning.os, "sched_getaffinity", lambda _: {0, 1, 2})
    spins.adapt(1.0)
    assert changes == []
    spins.adapt(1.5)
    assert changes == ["short"]


def test_use_of_the_cores_is_watched_without_any_step(control, monkeypatch):
    _, changes = control
    monkeypatch.setattr(openmp_spinning, "SAMPLE_INTERVAL_S", 0.001)
    is_over = threading.Event()

    def samples():
        # (time, CPU time of other processes) in seconds
        yield from [(0.0, 0.0), (0.5, 0.05), (1.0, 0.5), (1.5, 0.95), (2.0, 0.95)]
        is_over.set()
        yield from ((float(second), 0.95) for second in itertools.count(3))

    monkeypatch.setattr(openmp_spinning, "_sample_cpu_use", samples().__next__)
    spins = openmp_spinning.SpinControl()
    assert is_over.wait(10)
    spins.close()
    assert changes == ["short", "long"]


@needs_openmp
def test_spins_become_short_soon_after_other_processes_begin():
    num_cores = str(len(os.sched_getaffinity(0)))
    # torch needs all cores, so that a part of one core suffices: a virtual machine's cores may be used by others too.
    environment = {**os.environ, "OMP_NUM_THREADS": num_cores}
    code = WATCH.replace("NUM_BUSY_PROCESSES", num_cores)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_disabled_control_does_nothing(control, monkeypatch):
    _, changes = control
    monkeypatch.setattr(openmp_spinning, "_sample_cpu_use", lambda: pytest.fail("it looked"))
    off = openmp_spinning.SpinControl(is_on=False)
    off.close()
    assert changes == []


@pytest.mark.parametrize(("priority", "ticks"), [(0, 100 + 30 + 5 + 6), (5, 100 + 20 + 30 + 5 + 6)])
def test_busy_seconds_count_only_own_cores(tmp_path, monkeypatch, priority, ticks):
    file = tmp_path / "stat"
    file.write_text(
        "cpu  900 900 900 900 900 900 900 0 0 0\n"
        "cpu0 100 20 30 4000 50 5 6 0 0 0\n"
        "cpu1 700 0 0 0 0 0 0 0 0 0\n"
        "intr 5 0 0\n"
    )
    monkeypatch.setattr(openmp_spinning, "PROC_STAT", file)
    monkeypatch.setattr(openmp_spinning.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(openmp_spinning.os, "getpriority", lambda *_: priority)
    assert openmp_spinning._read_busy_seconds() == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))
