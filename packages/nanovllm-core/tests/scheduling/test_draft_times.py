import pytest

from nanovllm_core.scheduling.draft_times import DecodeTimes, DraftLimits, DraftTimes, measure_draft_times
from nanovllm_core.scheduling.step_time import StepWork

LIMITS = DraftLimits(max_drafts=3, max_step_tokens=64, uses_cache=True, can_lag=True)
MEASURED = (DecodeTimes(1, 0.010, 0.001, 0.002), DecodeTimes(3, 0.020, 0.0005, 0.004))


class Device:
    def __init__(self, speed: float = 1.0):
        self.measured: list[tuple[int, int, bool, int]] = []
        self._speed = speed

    def time_decodes(self, num_reqs: int, num_drafts: int = 0, *, proposes: bool = False, num_late: int = 0) -> float:
        self.measured.append((num_reqs, num_drafts, proposes, num_late))
        tokens_s = 1e-4 * num_reqs * (1 + num_drafts)
        return (1e-3 + tokens_s + 2e-3 * proposes + 3e-3 * bool(num_late) + 1e-5 * num_late) / self._speed


def test_measured_times_are_those_of_the_device():
    times = measure_draft_times(Device().time_decodes, 8, LIMITS)
    for num_requests in (1, 3, 8):
        assert times.predict(num_requests) == pytest.approx((num_requests, 1e-3 + 1e-4 * num_requests, 1e-4, 2e-3))
    assert (times.late_pass_s, times.late_entry_s) == pytest.approx((3e-3, 1e-5))


def test_steps_are_measured_up_to_the_limits():
    device = Device()
    measure_draft_times(device.time_decodes, 100, LIMITS)
    assert max(device.measured) == (32, 1, False, 0)
    # Measuring ends at the first step over 50 ms.
    slow = Device(speed=1 / 15)
    measure_draft_times(slow.time_decodes, 100, LIMITS)
    assert max(num_reqs for num_reqs, *_ in slow.measured) == 4


def test_finished_steps_correct_the_time_of_drafts_that_noise_hid_from_the_measurement():
    times = measure_draft_times(lambda *_, **__: 0.01, 1, LIMITS)
    assert 0 < times.predict(1).draft_s < 0.0001
    for _ in range(100):
        times.observe(1, 0.0, StepWork(4), 0.01 + 3 * 0.001)
    assert times.predict(1).draft_s == pytest.approx(0.001, rel=0.05)


def test_proposals_without_a_cache_are_not_measured():
    device = Device()
    times = measure_draft_times(device.time_decodes, 8, LIMITS._replace(uses_cache=False, can_lag=False))
    assert not any(proposes or num_late for *_, proposes, num_late in device.measured)
    assert (times.predict(2).proposal_s, times.late_pass_s, times.late_entry_s) == (0, 0, 0)


def test_times_are_zero_without_measurements():
    times = measure_draft_times(Device().time_decodes, 8, LIMITS._replace(max_step_tokens=1))
    assert times.predict(1) == (1, 0, 0, 0)
    times.observe(1, 0.0, StepWork(1), 0.01)
    assert times.predict(1) == (1, 0, 0, 0)


def test_times_are_interpolated_and_include_the_attention_to_the_context():
    times = DraftTimes(MEASURED)
    assert times.predict(2) == pytest.approx((2, 0.015, 0.00075, 0.003))
    assert times.predict(100, context_s=0.005) == pytest.approx((100, 0.025, 0.0005, 0.004))


def test_steps_without_drafts_correct_the_time_of_a_step():
    times = DraftTimes(MEASURED)
    for _ in range(100):
        times.observe(1, 0.0, StepWork(1), 0.015)
    assert times.predict(1) == pytest.approx((1, 0.015, 0.001, 0.002), rel=0.01)


def test_steps_with_drafts_correct_the_times_of_drafts_until_steps_without_drafts_follow():
    times = DraftTimes(MEASURED)
    for _ in range(100):
        times.observe(1, 0.0, StepWork(4, num_proposal_passes=1), 0.010 + 2 * 0.005)
    assert times.predict(1) == pytest.approx((1, 0.010, 0.002, 0.004), rel=0.01)
    for _ in range(500):
        times.observe(1, 0.0, StepWork(1), 0.010)
    assert times.predict(1) == pytest.approx(MEASURED[0], rel=0.01)


def test_one_slow_step_changes_the_times_little():
    times = DraftTimes(MEASURED)
    times.observe(1, 0.0, StepWork(1), 10.0)
    times.observe(1, 0.0, StepWork(4, num_proposal_passes=1), 10.0)
    assert times.predict(1).step_s < 1.5 * MEASURED[0].step_s
    assert times.predict(1).draft_s < 2 * MEASURED[0].draft_s


def test_steps_with_late_entries_correct_nothing():
    times = DraftTimes(MEASURED)
    times.observe(1, 0.0, StepWork(1, num_late_draft_entries=5), 1.0)
    assert times.predict(1) == MEASURED[0]
