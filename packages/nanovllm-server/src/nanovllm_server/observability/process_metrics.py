"""Metrics of the memory, CPU time and open files of the server's processes."""

import os
from collections.abc import Iterator

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from nanovllm_server.observability.shared_counters import SharedCounters


class ProcessMetrics(Collector):
    """Metrics of the parent, the engine and every worker. The label `process` names the process. Linux only.

    Only an HTTP worker may create this object, because `collect` reports this process's parent as `parent`.
    """

    def __init__(self, counters: SharedCounters, engine_pid: int | None):
        self._engine_pid = engine_pid
        self._worker_pids = counters.claim(1)
        # If this worker replaces a dead worker, the counter still holds the process id of the dead worker.
        self._worker_pids.clear()
        self._worker_pids.add(0, os.getpid())

    def collect(self) -> Iterator[Metric]:
        """Yields all metrics for prometheus-client."""
        pids = {"parent": os.getppid(), "engine": self._engine_pid}
        pids |= {f"worker-{index}": int(pid) for index, pid in enumerate(self._worker_pids.values_by_worker(0))}
        families: dict[str, Metric] = {}
        for process, pid in pids.items():
            if not pid:
                continue
            for family in ProcessCollector(pid=lambda pid=pid: pid, registry=None).collect():
                labelled_family = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labelled_family.add_sample(sample.name, {"process": process}, sample.value)
        yield from families.values()
