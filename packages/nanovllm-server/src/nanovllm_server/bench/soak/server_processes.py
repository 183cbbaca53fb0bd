"""Samples the resident memory of a server's processes from Linux's /proc."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from nanovllm_server.bench.report import BenchError

PROC = Path("/proc")
# Growth compares the median of the first samples with the median of the last samples. Each group has this share of all
# samples.
COMPARED_SHARE = 0.2


@dataclass(slots=True)
class ProcessMemory:
    """Resident memory of one process after the warm-up.

    parent_pid: process that started this one.
    role: name that the process gave itself, as in `ps -o comm`.
    rss_bytes: one sample per interval while the process lived.
    """

    pid: int
    parent_pid: int
    role: str
    rss_bytes: list[int] = field(default_factory=list)

    @property
    def start_bytes(self) -> float:
        """Median of the first samples."""
        return median(self.rss_bytes[: self._num_compared])

    @property
    def end_bytes(self) -> float:
        """Median of the last samples."""
        return median(self.rss_bytes[-self._num_compared :])

    @property
    def growth_percent(self) -> float:
        """Growth from the first samples to the last samples."""
        return 100 * (self.end_bytes / self.start_bytes - 1)

    @property
    def _num_compared(self) -> int:
        return max(1, int(len(self.rss_bytes) * COMPARED_SHARE))


class ServerProcesses:
    """A server's parent process and its descendants. Raises BenchError if the parent does not exist."""

    def __init__(self, parent_pid: int):
        self._parent_pid = parent_pid
        self._num_samples = 0
        self._memory_by_pid: dict[int, ProcessMemory] = {}
        if _read_status(parent_pid) is None:
            raise BenchError(f"no process {parent_pid} in {PROC}: --server-pid must name the server on this machine")

    def sample(self) -> None:
        """Adds one sample of every process that lives now."""
        self._num_samples += 1
        for pid, status in self._read_statuses().items():
            memory = self._memory_by_pid.get(pid)
            if memory is None:
                memory = self._memory_by_pid[pid] = ProcessMemory(pid, int(status["PPid"]), status["Name"])
            memory.rss_bytes.append(_rss_bytes(status))

    def current_rss_bytes(self) -> dict[int, int]:
        """Returns the resident bytes of every process by process id."""
        return {pid: _rss_bytes(status) for pid, status in self._read_statuses().items()}

    def current_anonymous_bytes(self) -> dict[int, int]:
        """Returns the resident bytes except file pages, by process id. The kernel may drop file pages at any time."""
        return {
            pid: _rss_bytes(status) - (int(status["RssFile"].split()[0]) << 10)
            for pid, status in self._read_statuses().items()
        }

    def split_by_lifetime(self) -> tuple[list[ProcessMemory], list[ProcessMemory]]:
        """Returns (processes that are in every sample, processes that started or ended between samples)."""
        memories = self._memory_by_pid.values()
        lasting_processes = [memory for memory in memories if len(memory.rss_bytes) == self._num_samples]
        return lasting_processes, [memory for memory in memories if len(memory.rss_bytes) < self._num_samples]

    def _read_statuses(self) -> dict[int, dict[str, str]]:
        """Returns the fields of /proc/PID/status by process id, for the parent and its descendants."""
        statuses = {
            pid: status
            for pid in (int(path.name) for path in PROC.iterdir() if path.name.isdecimal())
            if (status := _read_status(pid)) is not None
        }
        server_pids = {self._parent_pid} & statuses.keys()
        new_pids = server_pids
        while new_pids:
            new_pids = {pid for pid, status in statuses.items() if int(status["PPid"]) in new_pids} - server_pids
            server_pids = server_pids | new_pids
        return {pid: statuses[pid] for pid in sorted(server_pids)}


def _read_status(pid: int) -> dict[str, str] | None:
    """Returns the fields of /proc/PID/status; None for a process that has ended, even before its parent reaps it."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    return status if "VmRSS" in status else None


def _rss_bytes(status: dict[str, str]) -> int:
    return int(status["VmRSS"].split()[0]) << 10
