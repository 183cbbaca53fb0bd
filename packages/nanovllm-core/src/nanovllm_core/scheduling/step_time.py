"""Predicts the time of a step from its amount of work, with a linear function that is fitted to finished steps."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanovllm_kernels.attention import attention_pairs

# Each new observation multiplies the weights of earlier observations of its kind (prompts or decodes) by this factor.
_OBSERVATION_DECAY = 0.99
# Weight of decode steps in the fit: low, because predictions mostly serve to choose the lengths of prompt chunks.
_DECODE_WEIGHT = 0.25
# The fit uses every eighth decode step, because consecutive decode steps are alike. Steps that propose drafts are
# counted separately, because they may be rare.
_DECODE_STRIDE = 8
# Weight of the previous coefficients in the fit. Coefficients that recent steps do not determine thus keep their value.
_PRIOR_WEIGHT = 1e-3
# Each new error multiplies the weights of earlier errors in the mean error by this factor.
_ERROR_DECAY = 0.95
# Weight of a new decode step in the moving average of the times of decode steps.
_DECODE_STEP_WEIGHT = 0.1


class StepWork(NamedTuple):
    """The amount of work of a step.

    num_tokens: tokens of decodes and prompts, including padding.
    decode_context: sum of the decodes' context lengths, in tokens.
    prompt_pairs: number of pairs of a prompt's query token and a key token, see `AttentionEstimator.estimate_pairs`.
    num_proposal_passes: 1 if the step proposes drafts with a draft model or with heads, else 0.
    num_late_draft_entries: number of cache entries of the draft model that the step computes for earlier tokens.
    """

    num_tokens: int
    decode_context: int = 0
    prompt_pairs: int = 0
    num_proposal_passes: int = 0
    num_late_draft_entries: int = 0


class StepTimeCoefficients(NamedTuple):
    """Constant seconds of a step, and seconds per unit of each number in `StepWork`."""

    fixed: float = 0.0
    per_token: float = 0.0
    per_decode_context: float = 0.0
    per_prompt_pair: float = 0.0
    per_proposal: float = 0.0
    per_late_entry: float = 0.0


# Factors that scale the coefficients to similar magnitudes.
_COEFFICIENT_UNITS = 1 / np.array([1.0, 1e3, 1e6, 1e8, 1.0, 1e3])
# Chunks of these lengths are measured at start-up, until a step takes longer than _MAX_CALIBRATION_STEP_S.
_CALIBRATION_CHUNK_TOKENS = (1, 16, 64, 256, 1024, 4096)
_MAX_CALIBRATION_STEP_S = 0.02
# Then one more chunk, which follows cached tokens, is measured. The chunk has at most _CONTEXT_CHUNK_TOKENS tokens.
# The number of cached tokens is at most _CONTEXT_RATIO times the number of tokens of the chunk.
_CONTEXT_CHUNK_TOKENS = 512
_CONTEXT_RATIO = 32
# Initial `mean_excess`. Under load the device's clock rate falls, so steps take longer than the measurements predict.
_INITIAL_EXCESS = 0.02


def calibrate(
    model: "StepTimeModel", measure_step: Callable[[int, int], float], max_num_tokens: int, max_model_len: int
) -> None:
    """Measure a few steps before the first request, and fit `model` to the measurements.

    measure_step: (tokens of a chunk, cached tokens before the chunk) -> seconds of a step with this chunk.
    """
    num_tokens = 1
    for num_tokens in _CALIBRATION_CHUNK_TOKENS:
        if num_tokens > min(max_num_tokens, max_model_len):
            break
        seconds = measure_step(num_tokens, 0)
        is_decode = num_tokens == 1
        model.observe(StepWork(1, 1) if is_decode else StepWork(num_tokens, 0, attention_pairs(0, num_tokens)), seconds)
        if seconds > _MAX_CALIBRATION_STEP_S:
            break
    num_tokens = min(num_tokens, _CONTEXT_CHUNK_TOKENS, max_num_tokens, max_model_len // 2)
    context = min(_CONTEXT_RATIO * num_tokens, max_model_len - num_tokens)
    if num_tokens > 1:
        seconds = measure_step(num_tokens, context)
        model.observe(StepWork(num_tokens, 0, attention_pairs(context, num_tokens)), seconds)
    model.reset_errors(_INITIAL_EXCESS)


class StepTimeModel:
    """A linear model of step times, fitted online by weighted least squares with non-negative coefficients.

    Before the first observation, all predictions are 0.
    mean_error: mean relative error of recent predictions for steps with prompts.
    mean_excess: mean relative excess of recent steps with prompts over their prediction. A faster step counts as 0.
    decode_step_s: moving average of the times of steps without prompts; 0 before the first such step.
    """

    def __init__(self) -> None:
        self._prompt_steps, self._decode_steps = _NormalEquations(), _NormalEquations()
        self._coefficients = StepTimeCoefficients()
        self._is_stale = False
        self.mean_error = self.mean_excess = self.decode_step_s = 0.0
        self._num_decode_steps = Counter[int]()

    @property
    def coefficients(self) -> StepTimeCoefficients:
        """The coefficients fitted to all observations."""
        if self._is_stale:
            self._coefficients = self._fit()
            self._is_stale = False
        return self._coefficients

    def predict(self, work: StepWork) -> float:
        """Predicted seconds of a step with this work."""
        fixed, *rates = self.coefficients
        return fixed + sum(rate * amount for rate, amount in zip(rates, work, strict=True))

    def decode_context_seconds(self, num_tokens: int) -> float:
        """Seconds that the attention of decodes adds to a step. num_tokens: sum of the decodes' context lengths."""
        return self.coefficients.per_decode_context * num_tokens

    def max_chunk_tokens(self, start: int, seconds: float) -> float:
        """The number of tokens of a chunk that begins at `start` and takes `seconds`; infinity without observations."""
        per_token, per_pair = self.coefficients.per_token, self.coefficients.per_prompt_pair
        return _positive_root(per_pair / 2, per_token + per_pair * (start + 0.5), seconds)

    def max_attention_tokens(self, start: int, seconds: float) -> float:
        """The number of tokens of a chunk that begins at `start` and whose attention takes `seconds`."""
        per_pair = self.coefficients.per_prompt_pair
        return _positive_root(per_pair / 2, per_pair * (start + 0.5), seconds)

    def chunk_seconds(self, start: int, num_tokens: int) -> float:
        """Seconds that a chunk adds to a step."""
        return self.coefficients.per_token * num_tokens + self.attention_seconds(start, num_tokens)

    def attention_seconds(self, start: int, num_tokens: int) -> float:
        """Seconds that the attention of a chunk adds to a step."""
        return self.coefficients.per_prompt_pair * attention_pairs(start, num_tokens)

    def reset_errors(self, expected_excess: float = 0.0) -> None:
        """Forget the measured errors. expected_excess: new value of `mean_excess`."""
        self.mean_error, self.mean_excess = 0.0, expected_excess

    def observe(self, work: StepWork, seconds: float) -> None:
        """Add a finished step to the fit."""
        if seconds > 0:
            (self._observe_prompts if work.prompt_pairs else self._observe_decodes)(work, seconds)

    def _observe_prompts(self, work: StepWork, seconds: float) -> None:
        expected = self.predict(work)
        # The scale limits the influence of outliers, such as steps that compile a kernel.
        scale = max(seconds, expected / 2)
        self._prompt_steps.add(work, seconds, scale)
        self._is_stale = True
        if expected > 0:
            error = (seconds - expected) / scale
            self.mean_error += (1 - _ERROR_DECAY) * (min(abs(error), 1.0) - self.mean_error)
            self.mean_excess += (1 - _ERROR_DECAY) * (min(max(error, 0.0), 1.0) - self.mean_excess)

    def _observe_decodes(self, work: StepWork, seconds: float) -> None:
        usual_s = self.decode_step_s
        # Limit the influence of one slow step.
        change_s = _DECODE_STEP_WEIGHT * (min(seconds, 2 * usual_s) - usual_s)
        self.decode_step_s = seconds if usual_s == 0 else usual_s + change_s
        if self._num_decode_steps[work.num_proposal_passes] % _DECODE_STRIDE == 0 or work.num_late_draft_entries:
            self._decode_steps.add(work, seconds, max(seconds, usual_s / 2))
            self._is_stale = True
        self._num_decode_steps[work.num_proposal_passes] += 1

    def _fit(self) -> StepTimeCoefficients:
        # The normal equations are gram @ coefficients = moment.
        gram, moment = self._prompt_steps.mean()
        decode_gram, decode_moment = self._decode_steps.mean()
        gram, moment = gram + _DECODE_WEIGHT * decode_gram, moment + _DECODE_WEIGHT * decode_moment
        prior = np.array(self._coefficients) / _COEFFICIENT_UNITS
        prior_weights = _PRIOR_WEIGHT * np.diag(gram) + 1e-30
        gram, moment = gram + np.diag(prior_weights), moment + prior_weights * prior
        # Drop the most negative coefficient until no coefficient is negative.
        active_indices = np.arange(len(_COEFFICIENT_UNITS))
        solution = np.zeros(len(_COEFFICIENT_UNITS))
        while len(active_indices):
            active_solution = np.linalg.solve(gram[np.ix_(active_indices, active_indices)], moment[active_indices])
            if (active_solution >= 0).all():
                solution[active_indices] = active_solution
                break
            active_indices = np.delete(active_indices, active_solution.argmin())
        return StepTimeCoefficients(*(solution * _COEFFICIENT_UNITS).tolist())


def _positive_root(quadratic: float, linear: float, seconds: float) -> float:
    """The positive n with quadratic * n^2 + linear * n = seconds; 0 for negative seconds, infinity if linear <= 0."""
    if seconds <= 0:
        return 0.0
    if linear <= 0 or seconds == float("inf"):
        return float("inf")
    # This form is also valid for quadratic = 0.
    return 2 * seconds / (linear + (linear * linear + 4 * quadratic * seconds) ** 0.5)


class _NormalEquations:
    """The normal equations of a least-squares fit, as sums in which later observations have larger weights."""

    def __init__(self) -> None:
        self._gram = np.zeros((len(_COEFFICIENT_UNITS), len(_COEFFICIENT_UNITS)))
        self._moment = np.zeros(len(_COEFFICIENT_UNITS))
        self._weight = 0.0

    def add(self, work: StepWork, seconds: float, scale: float) -> None:
        """Add an observation. scale: number of seconds by which the observation's error is divided."""
        terms = np.array((1, *work), np.float64) * _COEFFICIENT_UNITS / scale
        self._gram = self._gram * _OBSERVATION_DECAY + np.outer(terms, terms)
        self._moment = self._moment * _OBSERVATION_DECAY + terms * (seconds / scale)
        self._weight = self._weight * _OBSERVATION_DECAY + 1

    def mean(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The means of the Gram matrix and of the moment vector; zeros before the first observation."""
        return self._gram / max(self._weight, 1.0), self._moment / max(self._weight, 1.0)
