"""Delays before workers are replaced."""

from nanovllm_server.processes.worker_pool import MAX_BACKOFF_S, compute_backoff_s


def test_delay_before_a_replacement_doubles_up_to_a_limit():
    delays = [0.0]
    while delays[-1] < MAX_BACKOFF_S:
        delays.append(compute_backoff_s(delays[-1]))
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert compute_backoff_s(MAX_BACKOFF_S) == MAX_BACKOFF_S
