"""Measures the time from sending a plan to decoding the plan on another rank: `python measure_plans.py [--plans N]`.

Plans come at the pace of decode steps. The reader's process needs a free core.
"""

import argparse
import multiprocessing
import time
from multiprocessing.connection import Connection

import numpy as np

from nanovllm_core.execution.plan_messages import PlanDecoder, PlanPublisher
from nanovllm_core.parallel.plan_ring import PlanRing
from nanovllm_core.scheduling.plan import BatchShape, NewBlocks, ScheduledRows, StepPlan

INTERVAL_S = 0.002


def make_plan(step_number: int, scheduled: ScheduledRows) -> StepPlan:
    num_rows = len(scheduled.rows)
    return StepPlan(step_number, [], NewBlocks(), scheduled, BatchShape(num_rows, num_rows, 1), 1000 + step_number)


def schedule(num_rows: int) -> ScheduledRows:
    return ScheduledRows(np.arange(num_rows), np.ones(num_rows, np.int64), np.ones(num_rows, np.bool_))


def receive(ring: PlanRing, num_plans: int, results: Connection) -> None:
    reader, decoder = ring.open_reader(0, spins=True), PlanDecoder()
    times_ns = np.zeros(num_plans, np.int64)
    results.send(None)
    for index in range(num_plans):
        decoder.decode(reader.read())
        times_ns[index] = time.monotonic_ns()
    results.send(times_ns)


def measure(num_rows: int, num_plans: int, *, changes_rows: bool) -> None:
    ring, context = PlanRing(1), multiprocessing.get_context("spawn")
    read_end, write_end = context.Pipe(duplex=False)
    process = context.Process(target=receive, args=(ring, num_plans, write_end))
    process.start()
    read_end.recv()
    publisher, scheduled, sent_ns = PlanPublisher(ring.open_writer(lambda: None)), schedule(num_rows), []
    for index in range(num_plans):
        time.sleep(INTERVAL_S)
        plan = make_plan(index, schedule(num_rows) if changes_rows else scheduled)
        sent_ns.append(time.monotonic_ns())
        publisher.publish(plan, 0)
    delays_us = (read_end.recv() - np.array(sent_ns)) / 1e3
    process.join()
    kind = "other rows in each step" if changes_rows else "the same rows"
    median, p99 = np.percentile(delays_us, (50, 99))
    print(f"{num_rows} decodes, {kind}: median {median:.1f} us, 99th percentile {p99:.1f} us, {num_plans} plans")


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--plans", type=int, default=1000)
    num_plans = options.parse_args().plans
    for changes_rows in (False, True):
        for num_rows in (1, 64, 256):
            measure(num_rows, num_plans, changes_rows=changes_rows)
