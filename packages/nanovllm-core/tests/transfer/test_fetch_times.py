from nanovllm_core.transfer.fetch_times import FetchTimes

SHORT, LONG = 50, 16_000


def test_a_fetch_of_a_short_prompt_says_nothing_about_long_prompts():
    times = FetchTimes()
    for _ in range(10):
        times.observe(SHORT, fetch_s=0.018, compute_s=0.005)
    assert not times.is_worthwhile(SHORT)
    assert times.is_worthwhile(LONG)


def test_one_slow_fetch_is_forgiven_and_several_are_not():
    times = FetchTimes()
    times.observe(LONG, fetch_s=1.5, compute_s=0.5)
    assert times.is_worthwhile(LONG)
    times.observe(LONG, fetch_s=1.5, compute_s=0.5)
    assert not times.is_worthwhile(LONG)


def test_fetches_are_tried_again_after_slow_fetches():
    times = FetchTimes()
    for _ in range(5):
        times.observe(LONG, fetch_s=1000.0, compute_s=0.5)
    num_computed = 0
    while not times.is_worthwhile(LONG):
        num_computed += 1
    assert 10 < num_computed < 40
    for _ in range(5):
        times.observe(LONG, fetch_s=0.6, compute_s=0.5)
    assert times.is_worthwhile(LONG)


def test_an_engine_without_measured_steps_does_not_fetch_repeatedly():
    times = FetchTimes()
    for _ in range(3):
        times.observe(LONG, fetch_s=0.5, compute_s=0.0)
    assert not times.is_worthwhile(LONG)
