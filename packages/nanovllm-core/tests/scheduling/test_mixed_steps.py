"""Which prompts share a step, and the order in which they are served."""

import numpy as np
import pytest

from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState, RequestStatus
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.plan import ScheduledStep, StepResults
from nanovllm_core.scheduling.prompt_scheduler import MAX_BYPASSES, MAX_WAITING_CANDIDATES
from nanovllm_core.scheduling.scheduler import Scheduler
from nanovllm_core.scheduling.step_time import StepWork
from nanovllm_kernels.attention import AttentionEstimator, attention_pairs

MAX_STEP_TOKENS, LONG_PROMPT_TOKENS, BLOCK_SIZE = 8192, 5000, 16


def make_scheduler(
    max_num_seqs: int, *, max_step_tokens: int = MAX_STEP_TOKENS, num_blocks: int = 4000, prefix_caching: bool = False
) -> Scheduler:
    cache = CacheManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching, hash_algorithm="fast", watermark=0)
    return Scheduler(
        [cache], max_num_seqs=max_num_seqs, limits=StepLimits(max_step_tokens), max_model_len=8192, eos_token_ids=[1]
    )


def add_request(scheduler: Scheduler, key: int, num_tokens: int, token: int = 2, priority: int = 0) -> RequestState:
    sampling = SamplingParams(ignore_eos=True)
    client_request = Request(f"r{key}", [token] * num_tokens, sampling, priority=priority, arrival_time=float(key))
    request = RequestState(key, client_request)
    scheduler.add(request)
    return request


def complete(scheduler: Scheduler, step: ScheduledStep) -> None:
    num_samples = int(step.plan.scheduled.is_sampled.sum())
    scheduler.complete(step, StepResults(np.full(num_samples, 7, np.int32), ()))


def run_step(scheduler: Scheduler) -> list[int]:
    """Returns the number of computed tokens of each request, in the order of the plan."""
    step = scheduler.schedule()
    complete(scheduler, step)
    return step.plan.scheduled.num_tokens.tolist()


def run_step_by_key(scheduler: Scheduler) -> dict[int, int]:
    """Returns the number of computed tokens by request key."""
    step = scheduler.schedule()
    rows, num_tokens, _ = step.plan.scheduled
    keys = scheduler.rows.keys[rows].tolist()
    complete(scheduler, step)
    return dict(zip(keys, num_tokens.tolist(), strict=True))


def test_prompts_alone_take_the_whole_token_budget():
    scheduler = make_scheduler(16)
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    add_request(scheduler, 1, LONG_PROMPT_TOKENS)
    assert run_step_by_key(scheduler) == {
        0: LONG_PROMPT_TOKENS,
        1: (MAX_STEP_TOKENS - LONG_PROMPT_TOKENS) // BLOCK_SIZE * BLOCK_SIZE,
    }


def test_a_short_prompt_goes_before_a_long_one_that_has_begun():
    scheduler = make_scheduler(16, max_step_tokens=1000)
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    assert run_step_by_key(scheduler) == {0: 992}
    add_request(scheduler, 1, 100)
    assert run_step_by_key(scheduler) == {0: 896, 1: 100}


def test_a_prompt_with_little_left_to_compute_goes_before_one_with_fewer_tokens():
    scheduler = make_scheduler(16, max_step_tokens=200, prefix_caching=True)
    add_request(scheduler, 0, 1600)
    while scheduler.rows.num_tokens[0] - scheduler.rows.num_computed_tokens[0] > 1 or not scheduler.running_requests:
        run_step(scheduler)
    add_request(scheduler, 1, 300, token=3)
    add_request(scheduler, 2, 1650)
    assert run_step_by_key(scheduler)[2] == 50


def test_the_oldest_prompt_gets_a_quarter_of_the_steps_beside_endless_short_ones():
    scheduler = make_scheduler(64, max_step_tokens=320)
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    run_step(scheduler)
    is_served = []
    for key in range(1, 401):
        add_request(scheduler, key, 300)
        step = scheduler.schedule()
        is_served.append(0 in scheduler.rows.keys[step.plan.scheduled.rows].tolist())
        complete(scheduler, step)
        for request in scheduler.running_requests:
            if request.key and scheduler.rows.num_host_tokens[request.row] > request.num_prompt_tokens:
                scheduler.abort(request.key)
        if not scheduler.rows.is_running[0]:
            break
    distances = np.diff(np.flatnonzero(is_served))
    assert distances.max() <= 4


def test_the_oldest_waiting_prompt_starts_soon_beside_shorter_ones_that_take_several_steps():
    scheduler = make_scheduler(1, max_step_tokens=512)
    add_request(scheduler, 0, 600)
    run_step(scheduler)
    long = add_request(scheduler, 1, LONG_PROMPT_TOKENS)
    for key in range(2, 12):
        add_request(scheduler, key, 600)
    for _ in range(12):
        for request in scheduler.running_requests:
            if request.output_ids:
                scheduler.abort(request.key)
        run_step(scheduler)
    assert long.row >= 0


def test_a_more_urgent_prompt_is_served_first_even_if_it_is_longer():
    scheduler = make_scheduler(16, max_step_tokens=1000)
    add_request(scheduler, 0, 500)
    add_request(scheduler, 1, LONG_PROMPT_TOKENS, priority=-1)
    assert run_step_by_key(scheduler) == {1: 992}


def test_a_burst_larger_than_the_window_begins_in_as_few_steps_as_its_tokens_need():
    scheduler = make_scheduler(256)
    for key in range(256):
        add_request(scheduler, key, 64)
    assert MAX_WAITING_CANDIDATES < 128
    assert [run_step(scheduler) for _ in range(4)] == [
        [64] * 128,
        [1] * 128 + [64] * 126,
        [1] * 254 + [64] * 2,
        [1] * 256,
    ]


def test_prompts_are_served_beside_thousands_of_decodes():
    count = 2100
    scheduler = make_scheduler(count + 1, max_step_tokens=count + 1 + BLOCK_SIZE)
    for key in range(count):
        add_request(scheduler, key, 1)
    run_step(scheduler)
    add_request(scheduler, count, 40)
    assert run_step(scheduler) == [1] * count + [BLOCK_SIZE]


def test_new_prompts_of_several_tokens_come_last_in_a_step():
    scheduler = make_scheduler(16, prefix_caching=True)
    add_request(scheduler, 0, 3 * BLOCK_SIZE)
    run_step(scheduler)
    add_request(scheduler, 1, 100, token=3)
    add_request(scheduler, 2, 3 * BLOCK_SIZE + 9)
    add_request(scheduler, 3, 1, token=4)
    assert run_step(scheduler) == [1, 1, 9, 100]


def test_a_request_that_lacks_blocks_is_not_retried_before_enough_are_free(monkeypatch):
    scheduler = make_scheduler(16, num_blocks=100)
    add_request(scheduler, 0, 50 * BLOCK_SIZE - 8)
    run_step(scheduler)
    add_request(scheduler, 1, 80 * BLOCK_SIZE)
    add_request(scheduler, 2, 70 * BLOCK_SIZE)
    attempted_keys = []
    admit = scheduler.caches[0].admit
    monkeypatch.setattr(
        scheduler.caches[0], "admit", lambda request, **kw: attempted_keys.append(request.key) or admit(request, **kw)
    )
    for _ in range(5):
        run_step(scheduler)
    assert sorted(attempted_keys) == [1, 2]
    scheduler.abort(0)
    assert run_step_by_key(scheduler) == {2: 70 * BLOCK_SIZE}
    scheduler.abort(2)
    assert run_step_by_key(scheduler) == {1: 80 * BLOCK_SIZE}


def add_blocked_request(scheduler: Scheduler, key: int) -> tuple[RequestState, RequestState]:
    """Fill half of 1,000 blocks. Returns (the request that holds them, a request that needs more than the others)."""
    holder = add_request(scheduler, 0, 500 * BLOCK_SIZE)
    run_step(scheduler)
    large = add_request(scheduler, key, 501 * BLOCK_SIZE)
    run_step(scheduler)
    assert large.row < 0
    return holder, large


def test_a_request_that_lacks_blocks_is_overtaken_a_limited_number_of_times():
    scheduler = make_scheduler(64, num_blocks=1000)
    holder, large = add_blocked_request(scheduler, 1)
    for key in range(2, 2 + MAX_BYPASSES + 10):
        add_request(scheduler, key, BLOCK_SIZE, token=3)
    for _ in range(3):
        run_step(scheduler)
    assert scheduler.num_waiting == 1 + 10
    scheduler.abort(holder.key)
    for _ in range(3):
        run_step(scheduler)
    assert large.row >= 0
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("priority", [0, -1])
def test_the_limit_holds_for_each_request_that_lacks_blocks(priority):
    scheduler = make_scheduler(64, num_blocks=1000)
    holder, first = add_blocked_request(scheduler, 1)
    second = add_request(scheduler, 2, 502 * BLOCK_SIZE, priority=priority)
    run_step(scheduler)
    for key in range(3, 3 + MAX_BYPASSES + 10):
        add_request(scheduler, key, BLOCK_SIZE, token=3, priority=priority)
    for request in (first, holder):
        for _ in range(3):
            run_step(scheduler)
        assert scheduler.num_waiting - (first.status is RequestStatus.WAITING) == 1 + 10
        scheduler.abort(request.key)
    for _ in range(3):
        run_step(scheduler)
    assert second.row >= 0
    assert scheduler.num_waiting == 0


def test_a_request_that_lacks_blocks_is_served_although_many_earlier_requests_were_queued_later():
    scheduler = make_scheduler(256, num_blocks=1000)
    holder, large = add_blocked_request(scheduler, 1000)
    # These requests precede the large request in the queue, like the choices of a request with `n`.
    others = [add_request(scheduler, key, BLOCK_SIZE, token=3) for key in range(1, 2 * MAX_WAITING_CANDIDATES)]
    for _ in range(3):
        run_step(scheduler)
    for request in (holder, *others):
        if request.row >= 0:
            scheduler.abort(request.key)
    for _ in range(3):
        run_step(scheduler)
    assert large.row >= 0
    assert scheduler.num_waiting == 0


ESTIMATOR = AttentionEstimator(tile_tokens=32, tiles_per_round=16)


def make_fitted_scheduler(limits: StepLimits, per_token: float, per_pair: float) -> Scheduler:
    scheduler = make_scheduler(16)
    scheduler.limits = scheduler._prompt_scheduler._limits = limits
    for num_tokens, start in ((100, 0), (1000, 0), (1000, 5000), (200, 8000)):
        pairs = attention_pairs(start, num_tokens)
        scheduler.step_time_model.observe(StepWork(num_tokens, 0, pairs), per_token * num_tokens + per_pair * pairs)
    scheduler.step_time_model.reset_errors()
    return scheduler


@pytest.mark.parametrize(
    ("budget", "per_pair", "expected"),
    [(640, 1e-9, 640), (640, 1e-6, 512), (960, 1e-6, 960), (400, 1e-6, 400), (1200, 1e-6, 1024)],
)
def test_a_chunk_drops_a_mostly_idle_last_round_if_attention_takes_most_of_the_time(budget, per_pair, expected):
    scheduler = make_fitted_scheduler(StepLimits(budget, attention_estimator=ESTIMATOR), 1e-5, per_pair)
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    assert run_step(scheduler) == [expected]


@pytest.mark.parametrize(("limit_s", "expected"), [(0.0190, 928), (0.0165, 512)])
def test_a_chunk_is_cut_where_its_last_round_of_attention_would_exceed_the_limit(limit_s, expected):
    scheduler = make_fitted_scheduler(
        StepLimits(8192, prompt_step_limit_s=limit_s, attention_estimator=ESTIMATOR), 1e-5, 2e-8
    )
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    assert run_step(scheduler) == [expected]


def test_a_step_ends_at_a_padded_size_where_padding_would_exceed_its_limit():
    limits = StepLimits(8192, prompt_step_limit_s=0.02, padded_token_counts=(256, 512, 1024, 1536, 2048, 4096))
    scheduler = make_fitted_scheduler(limits, 1e-5, 1e-12)
    add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    assert run_step(scheduler) == [1536]
    assert scheduler.schedule().work.num_tokens == 1536


def test_a_step_that_mostly_attends_is_not_cut_to_the_padded_size_below():
    limits = StepLimits(8192, prompt_step_limit_s=0.05, padded_token_counts=(512, 768, 1024))
    scheduler = make_fitted_scheduler(limits, 1e-5, 2e-8)
    request = add_request(scheduler, 0, LONG_PROMPT_TOKENS)
    counts = [run_step(scheduler)[0] for _ in range(6)]
    assert any(512 < count < 760 for count in counts)
    for count, start in zip(counts, np.cumsum([0, *counts]), strict=False):
        seconds = 1e-5 * limits.pad(count) + 2e-8 * attention_pairs(int(start), count)
        assert seconds <= 0.05
    assert request.num_prompt_tokens == LONG_PROMPT_TOKENS


def test_a_prompt_that_fits_with_its_padding_is_not_cut():
    limits = StepLimits(8192, prompt_step_limit_s=0.025, padded_token_counts=(1024, 2048, 4096))
    scheduler = make_fitted_scheduler(limits, 1e-5, 1e-12)
    add_request(scheduler, 0, 2047)
    step = scheduler.schedule()
    assert step.plan.scheduled.num_tokens.tolist() == [2047]
    assert step.work.num_tokens == 2048


def test_a_long_prompt_does_not_fill_a_step_that_completes_a_short_one():
    scheduler = make_fitted_scheduler(StepLimits(8192, prompt_step_limit_s=0.04, mixed_step_limit_s=0.01), 1e-5, 1e-12)
    add_request(scheduler, 0, 8000)
    assert run_step(scheduler) == [pytest.approx(4000, rel=0.02)]
    add_request(scheduler, 1, 100)
    assert run_step(scheduler) == [pytest.approx(900, rel=0.03), 100]


def test_prompts_that_a_step_completes_may_take_all_of_its_time():
    limits = StepLimits(8192, prompt_step_limit_s=0.04, mixed_step_limit_s=0.02)
    scheduler = make_fitted_scheduler(limits, 1e-5, 1e-12)
    for key in range(4):
        add_request(scheduler, key, 1200)
    assert run_step(scheduler) == [1200, 1200, 1200]
