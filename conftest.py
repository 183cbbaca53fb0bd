"""Environment of all processes of a test run, the same random numbers for each test, and tests in the background.

Python's bytecode is always kept: otherwise each of about forty processes would compile torch again.

Each process computes with one thread unless the environment sets another number. The models are so small that a second
thread gains little, and it would wait at every operator, because other processes run beside most tests.

Most tests use one core. Therefore a second process runs the tests with the marker `background` beside all others.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# This process imports most modules first, so it must write their bytecode too.
sys.dont_write_bytecode = False
# torch reads this variable on its first import. No pytest plugin imports torch before this line.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Niceness of the second process: its tests yield to all others.
NICE = 19
MAX_WAIT_S = 3600


@pytest.fixture(autouse=True)
def seeded_torch() -> None:
    """Seed torch, so that a test has the same random numbers alone and after any other tests."""
    import torch  # After the variable above is set.

    torch.manual_seed(0)


class BackgroundRun(pytest.Item):
    """A process that runs other tests. The item waits for its end, and fails if one of these tests fails."""

    def __init__(self, *, node_ids: list[str], **options: Any):
        super().__init__(**options)
        self._node_ids = node_ids
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = tempfile.TemporaryDirectory()
        self._output = Path(self._directory.name, "output")
        self.add_marker("waits")
        self.add_marker(pytest.mark.timeout(MAX_WAIT_S))

    def start(self) -> None:
        """Start the process."""
        arguments = Path(self._directory.name, "arguments")
        arguments.write_text("\n".join(self._node_ids))
        # -m '': the tests were already selected.
        command = ["nice", "-n", str(NICE), sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                [*command, f"@{arguments}"], cwd=self.config.rootpath, stdout=output, stderr=subprocess.STDOUT
            )

    def runtest(self) -> None:
        """Wait for the end of the process."""
        assert self._process is not None
        if self._process.wait() != 0:
            pytest.fail(self._output.read_text()[-20_000:], pytrace=False)

    def summary(self) -> str:
        """The last line that the process has written."""
        return self._output.read_text().strip().rpartition("\n")[2]

    def close(self) -> None:
        """Kill the process if it runs, and delete its files."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()


BACKGROUND_RUN = pytest.StashKey[BackgroundRun]()


# trylast: run after pytest has deselected tests.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Replace the tests with the marker `background` by one item, if the run has other tests too."""
    moved = [item for item in items if item.get_closest_marker("background") and not item.get_closest_marker("gpu")]
    if not moved or len(moved) == len(items) or config.option.collectonly or config.option.usepdb:
        return
    moved_ids = dict.fromkeys(item.nodeid for item in moved)
    run = BackgroundRun.from_parent(session, name=f"{len(moved)} tests in the background", node_ids=[*moved_ids])
    items[:] = [*(item for item in items if item.nodeid not in moved_ids), run]
    config.hook.pytest_deselected(items=moved)
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
    """Kill the process if the run ends early."""
    if (run := config.stash.get(BACKGROUND_RUN, None)) is not None:
        run.close()
