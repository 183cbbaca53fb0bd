"""Sets the environment of test processes, seeds torch, and runs tests with the marker `background` beside all others.

Two background processes share these tests. The processes have a low priority.
"""

import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

# Keep bytecode: otherwise each test process would compile torch again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# torch reads this variable on its first import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

NICE = 19
# The tests are already selected, so -m '' overrides the project's selection by markers.
PYTEST_OPTIONS = ("-q", "-p", "no:cacheprovider", "-m", "")
# Maximum time for which the last test waits for the background processes.
MAX_WAIT_S = 1800
# Environment variable: a directory with one file for each test that a background process has claimed.
CLAIMS_VARIABLE = "NANOVLLM_TEST_CLAIMS"


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Seed torch."""
    import torch  # Not at the top, because OMP_NUM_THREADS must be set first.

    torch.manual_seed(0)


class BackgroundRun(pytest.Item):
    """An item that runs other tests in background processes, waits for them, and fails if one of the tests fails."""

    def __init__(self, *, node_ids: list[str], **options: Any):
        super().__init__(**options)
        self._node_ids = node_ids
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directory = tempfile.TemporaryDirectory()
        self.add_marker("waits")
        self.add_marker(pytest.mark.timeout(0))  # `runtest` has its own limit.

    def start(self) -> None:
        """Start two background processes. The second process begins with the last modules."""
        self._start_process(self._node_ids)
        groups = itertools.groupby(self._node_ids, lambda node_id: node_id.partition("::")[0])
        node_ids_by_module = [list(node_ids) for _, node_ids in groups]
        self._start_process(itertools.chain.from_iterable(reversed(node_ids_by_module)))

    def _start_process(self, node_ids: Iterable[str]) -> None:
        index = len(self._processes)
        arguments = Path(self._directory.name, f"arguments-{index}")
        arguments.write_text("\n".join(node_ids))
        claims = Path(self._directory.name, "claims")
        claims.mkdir(exist_ok=True)
        command = ["nice", "-n", str(NICE), sys.executable, "-m", "pytest", *PYTEST_OPTIONS]
        with self._output_path(index).open("w") as output:
            process = subprocess.Popen(
                [*command, f"@{arguments}"],
                cwd=self.config.rootpath,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, CLAIMS_VARIABLE: str(claims)},
            )
        self._processes.append(process)

    def _output_path(self, index: int) -> Path:
        return Path(self._directory.name, f"output-{index}")

    def runtest(self) -> None:
        """Wait for the processes, and fail with the outputs of those that fail or do not end."""
        deadline_s = time.monotonic() + MAX_WAIT_S
        failures = []
        for index, process in enumerate(self._processes):
            try:
                exit_code = process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                exit_code = None
            if exit_code != 0:
                end = f"has not ended within {MAX_WAIT_S} s" if exit_code is None else f"has exit code {exit_code}"
                output = self._output_path(index).read_text()[-20_000:]
                failures.append(f"background process {index} {end}:\n{output}")
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def summary(self) -> str:
        """The last lines that the processes have written."""
        outputs = [self._output_path(index).read_text() for index in range(len(self._processes))]
        return "; ".join(output.strip().rpartition("\n")[2] for output in outputs)

    def close(self) -> None:
        """Kill the processes that run, and delete their files."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._directory.cleanup()


BACKGROUND_RUN = pytest.StashKey[BackgroundRun]()


# trylast: run after pytest has deselected tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Replace the tests with the marker `background` by one item, if the run has other tests too."""
    background_items = [
        item for item in items if item.get_closest_marker("background") and not item.get_closest_marker("gpu")
    ]
    if not background_items or len(background_items) == len(items) or config.option.collectonly or config.option.usepdb:
        return
    background_ids = dict.fromkeys(item.nodeid for item in background_items)
    run = BackgroundRun.from_parent(
        session, name=f"{len(background_items)} tests in the background", node_ids=[*background_ids]
    )
    items[:] = [*(item for item in items if item.nodeid not in background_ids), run]
    config.hook.pytest_deselected(items=background_items)
    config.stash[BACKGROUND_RUN] = run


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the tests in the background."""
    if (run := session.config.stash.get(BACKGROUND_RUN, None)) is not None:
        run.start()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the result of the tests in the background."""
    if (run := config.stash.get(BACKGROUND_RUN, None)) is not None:
        terminalreporter.write_line(f"{run.name}: {run.summary()}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill the processes if the run ends early."""
    if (run := config.stash.get(BACKGROUND_RUN, None)) is not None:
        run.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """In a background process, run the tests that no other process has claimed.

    A process claims its next test before the current test runs, because pytest must know the next test.
    """
    # Processes that a test starts must not claim tests.
    directory = os.environ.pop(CLAIMS_VARIABLE, None)
    if directory is None:
        return None
    claimed_items = (item for item in session.items if _claim_test(Path(directory), item.nodeid))
    item = next(claimed_items, None)
    while item is not None:
        next_item = next(claimed_items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = next_item
    return True


def _claim_test(directory: Path, node_id: str) -> bool:
    try:
        (directory / hashlib.sha256(node_id.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
