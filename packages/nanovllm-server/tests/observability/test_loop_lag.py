import asyncio
import time

from loopback import until

from nanovllm_server.observability import loop_lag


async def test_blocked_event_loop_is_measured(monkeypatch):
    monkeypatch.setattr(loop_lag, "LAG_INTERVAL_S", 0.01)
    lags: list[float] = []
    task = asyncio.create_task(loop_lag.measure_loop_lag(lags.append))
    await until(lambda: lags)
    num_lags = len(lags)
    time.sleep(0.2)  # noqa: ASYNC251
    await until(lambda: len(lags) > num_lags)
    task.cancel()
    # At most one interval (0.01 s) of the blocked time does not count as lag.
    assert lags[num_lags] > 0.15
    assert min(lags) >= 0
