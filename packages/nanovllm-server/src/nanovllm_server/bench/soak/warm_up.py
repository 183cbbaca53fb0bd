"""The warm-up of `soak`: requests fill the server's caches, then random traffic runs until memory stays flat."""

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto

from nanovllm_server.bench.soak.server_processes import ProcessMemory

# Memory is flat if each process has grown by less than this during the last `min_flat_s` seconds.
MAX_FLAT_GROWTH_PERCENT = 0.5


class Phase(Enum):
    """The phase of a soak, which decides what the clients send.

    FILL: requests that fill caches. SETTLE: random requests. MEASURE: random requests, while memory is measured.
    """

    FILL = auto()
    SETTLE = auto()
    MEASURE = auto()


class WarmUp:
    """Ends each phase of the warm-up when the memory of all processes has been flat for `min_flat_s` seconds.

    The phase FILL lasts at least until the clients have begun all requests with large schemas and long prompts.

    end_time: value of `time.monotonic` at which the warm-up ends even if memory still grows.
    num_large_schemas_left, num_long_prompts_left: numbers of requests that the clients must still begin. Clients
        decrement the numbers, even below 0.
    """

    def __init__(self, min_flat_s: float, end_time: float, num_large_schemas_left: int, num_long_prompts_left: int):
        self.num_large_schemas_left = num_large_schemas_left
        self.num_long_prompts_left = num_long_prompts_left
        self.phase = Phase.FILL
        self.is_flat = False  # Whether memory was flat at the end of the warm-up.
        self._min_flat_s = min_flat_s
        self._end_time = end_time
        # Samples of this phase: (time, bytes by process id). The oldest sample is at most `min_flat_s` old.
        self._samples: deque[tuple[float, Mapping[int, int]]] = deque()
        self._phase_start_time: float | None = None

    def add_sample(self, now: float, bytes_by_pid: Mapping[int, int]) -> None:
        """Adds a sample of memory (bytes by process id), and enters the next phase if this phase has ended."""
        if self.phase is Phase.MEASURE:
            return
        if self._phase_start_time is None:
            self._phase_start_time = now
        self._samples.append((now, bytes_by_pid))
        while self._samples[0][0] < now - self._min_flat_s:
            self._samples.popleft()
        self.is_flat = now - self._phase_start_time >= self._min_flat_s and self._max_growth() < MAX_FLAT_GROWTH_PERCENT
        if now >= self._end_time:
            self.phase = Phase.MEASURE
        elif self.is_flat and (self.phase is not Phase.FILL or not self._has_unsent_requests()):
            self.phase = Phase.SETTLE if self.phase is Phase.FILL else Phase.MEASURE
            self._phase_start_time = None
            self._samples.clear()

    def _has_unsent_requests(self) -> bool:
        return self.num_large_schemas_left > 0 or self.num_long_prompts_left > 0

    def _max_growth(self) -> float:
        """Returns the largest growth of a process, in percent. Ignores processes that are not in all samples."""
        samples = [bytes_by_pid for _, bytes_by_pid in self._samples]
        lasting_pids = set(samples[0]).intersection(*samples)
        memories = (ProcessMemory(pid, 0, "", [sample[pid] for sample in samples]) for pid in lasting_pids)
        return max((memory.growth_percent for memory in memories), default=0.0)
