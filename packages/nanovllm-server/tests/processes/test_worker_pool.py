"""Delays before workers are replaced."""

from nanovllm_server.processes.worker_pool import MAX_BACKOFF_S, next_backoff


def test_delay_before_a_replacement_doubles_up_to_a_limit():
    delays = [0.0]
    while delays[-1] < MAX_BACKOFF_S:
        delays.append(next_backoff(delays[-1]))
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30]
    assert next_backoff(MAX_BACKOFF_S) == MAX_BACKOFF_S
