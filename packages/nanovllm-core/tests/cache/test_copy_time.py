import pytest

from nanovllm_core.cache.copy_time import CopyTimeModel


def observe_line(model, fixed_s, s_per_byte, sizes):
    for num_bytes in sizes:
        model.observe(num_bytes, fixed_s + s_per_byte * num_bytes)


def test_nothing_is_predicted_before_the_first_copy():
    assert CopyTimeModel().predict(1 << 30) == 0


@pytest.mark.parametrize(("fixed_s", "s_per_byte"), [(1e-3, 2e-11), (0.0, 1e-9), (5e-3, 1e-12)])
def test_fixed_time_and_rate_are_found(fixed_s, s_per_byte):
    model = CopyTimeModel()
    observe_line(model, fixed_s, s_per_byte, [1 << 20, 64 << 20, 1 << 24, 1 << 28] * 5)
    for num_bytes in (1 << 22, 1 << 30):
        assert model.predict(num_bytes) == pytest.approx(fixed_s + s_per_byte * num_bytes, rel=1e-3)


def test_small_copies_do_not_prevent_the_first_large_copy():
    model = CopyTimeModel()
    observe_line(model, 1e-2, 1e-11, [1 << 20] * 3)
    assert model.predict(1 << 30) == pytest.approx(model.predict(1 << 20))
    observe_line(model, 1e-2, 1e-11, [1 << 30])
    assert model.predict(1 << 29) == pytest.approx(1e-2 + 1e-11 * (1 << 29))


def test_a_large_copy_does_not_prevent_the_first_small_copy():
    model = CopyTimeModel()
    model.observe(1 << 30, 0.1)
    assert model.predict(1 << 20) == pytest.approx(0.1 / 1024)


def test_recent_copies_count_more():
    model = CopyTimeModel()
    observe_line(model, 0.0, 1e-9, [1 << 20, 1 << 24] * 50)
    observe_line(model, 0.0, 1e-8, [1 << 20, 1 << 24] * 50)
    assert model.predict(1 << 24) == pytest.approx((1 << 24) * 1e-8, rel=0.05)


def test_a_slow_copy_does_not_prevent_copies_forever():
    model = CopyTimeModel()
    model.observe(1 << 20, 10.0)
    num_rejections = 0
    while model.predict(1 << 20) > 0.1:
        model.reject()
        num_rejections += 1
    assert 100 < num_rejections < 1000
    model.observe(1 << 20, 10.0)
    assert model.predict(1 << 20) == pytest.approx(10.0)
