import math
import random

import pytest

from nanovllm_core.scheduling.step_time import StepTimeModel, StepWork, calibrate
from nanovllm_kernels.attention import attention_pairs

FIXED, PER_TOKEN, PER_DECODE_CONTEXT, PER_PAIR = 4e-3, 2e-5, 3e-8, 9e-10


def linear_seconds(work: StepWork) -> float:
    return FIXED + PER_TOKEN * work.num_tokens + PER_DECODE_CONTEXT * work.decode_context + PER_PAIR * work.prompt_pairs


def random_work(rng: random.Random) -> StepWork:
    num_decodes, chunk_tokens, start = rng.randrange(100), rng.choice([0, 16, 300, 2000]), rng.randrange(50_000)
    pairs = attention_pairs(start, chunk_tokens) if chunk_tokens else 0
    return StepWork(max(num_decodes + chunk_tokens, 1), num_decodes * rng.randrange(1, 30_000), pairs)


@pytest.fixture
def fitted_model() -> StepTimeModel:
    model, rng = StepTimeModel(), random.Random(0)
    for _ in range(300):
        work = random_work(rng)
        model.observe(work, linear_seconds(work))
    return model


def test_steps_of_linear_cost_are_predicted(fitted_model):
    rng = random.Random(1)
    for _ in range(100):
        work = random_work(rng)
        assert fitted_model.predict(work) == pytest.approx(linear_seconds(work), rel=0.02)
    assert fitted_model.mean_error < 0.02


def test_a_chunk_of_maximum_length_takes_the_allowed_time(fitted_model):
    for start in (0, 1000, 90_000):
        tokens = fitted_model.max_chunk_tokens(start, 0.04)
        assert fitted_model.chunk_seconds(start, int(tokens)) == pytest.approx(0.04, rel=0.01)


def test_one_outlier_changes_predictions_little(fitted_model):
    work = StepWork(1000, 0, attention_pairs(0, 1000))
    previous = fitted_model.predict(work)
    fitted_model.observe(work, 100 * previous)
    assert fitted_model.predict(work) == pytest.approx(previous, rel=0.05)


def test_predictions_follow_a_device_that_becomes_slower(fitted_model):
    rng = random.Random(2)
    for _ in range(500):
        work = random_work(rng)
        fitted_model.observe(work, 2 * linear_seconds(work))
    work = StepWork(1000, 0, attention_pairs(0, 1000))
    assert fitted_model.predict(work) == pytest.approx(2 * linear_seconds(work), rel=0.05)


def test_coefficients_are_never_negative():
    model, rng = StepTimeModel(), random.Random(3)
    for _ in range(200):
        model.observe(random_work(rng), rng.uniform(0.001, 0.1))
        assert min(model.coefficients) >= 0


def test_many_decode_steps_do_not_change_the_cost_of_prompts(fitted_model):
    previous = fitted_model.coefficients.per_prompt_pair
    for _ in range(5000):
        fitted_model.observe(StepWork(64, 64_000), linear_seconds(StepWork(64, 64_000)))
    assert fitted_model.coefficients.per_prompt_pair == pytest.approx(previous, rel=0.1)


def test_before_any_observation_chunks_are_unlimited():
    model = StepTimeModel()
    assert model.predict(StepWork(8192, 0, 10**9)) == 0
    assert model.max_chunk_tokens(0, 0.01) == math.inf


def test_chunks_are_unlimited_without_a_time_limit(fitted_model):
    assert fitted_model.max_chunk_tokens(0, math.inf) == math.inf


@pytest.mark.parametrize("seconds_per_token", [2e-6, 1e-4, 1e-2])
def test_calibration_is_short_and_finds_the_cost_of_prompts(seconds_per_token):
    step_times_s = []

    def time_step(num_tokens: int, context: int) -> float:
        seconds = 1e-3 + seconds_per_token * num_tokens + seconds_per_token / 1e4 * attention_pairs(context, num_tokens)
        step_times_s.append(seconds)
        return seconds

    model = StepTimeModel()
    calibrate(model, time_step, 8192, 8192)
    assert sum(step_times_s) < 0.5
    work = StepWork(4000, 0, attention_pairs(0, 4000))
    assert model.predict(work) == pytest.approx(seconds_per_token * (4000 + 800) + 1e-3, rel=0.25)


def test_only_steps_that_take_longer_than_predicted_count_as_excess(fitted_model):
    work = StepWork(1000, 0, attention_pairs(0, 1000))
    previous = fitted_model.mean_excess
    fitted_model.observe(work, 0.8 * fitted_model.predict(work))
    assert fitted_model.mean_excess < previous
    fitted_model.observe(work, 1.2 * fitted_model.predict(work))
    assert fitted_model.mean_excess > previous
    fitted_model.reset_errors()
    assert fitted_model.mean_excess == fitted_model.mean_error == 0


def test_a_model_that_was_only_calibrated_expects_some_excess():
    model = StepTimeModel()
    calibrate(model, lambda num_tokens, _: 1e-3 + 1e-5 * num_tokens, 8192, 8192)
    assert model.mean_error == 0
    assert 0.01 <= model.mean_excess <= 0.05
