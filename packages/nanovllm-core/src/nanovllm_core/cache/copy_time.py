"""Predicts how long copies between tiers (caches, host memory, files) take, from the times of earlier copies."""

# Each new observation multiplies the weights of earlier observations by this factor.
_DECAY = 0.95
# Each decision against a copy multiplies later predictions by this factor, until a copy is measured again. Otherwise
# one slow copy could prevent all later copies.
_DECAY_WITHOUT_COPIES = 0.98


class CopyTimeModel:
    """A line through observed pairs (bytes, seconds), fitted by weighted least squares. Predicts 0 without pairs."""

    def __init__(self) -> None:
        self._weight_sum = self._bytes_sum = self._seconds_sum = self._squared_bytes_sum = self._product_sum = 0.0
        self._rejection_factor = 1.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Add a copy of `num_bytes` that took `seconds`."""
        self._weight_sum = self._weight_sum * _DECAY + 1
        self._bytes_sum = self._bytes_sum * _DECAY + num_bytes
        self._seconds_sum = self._seconds_sum * _DECAY + seconds
        self._squared_bytes_sum = self._squared_bytes_sum * _DECAY + num_bytes * num_bytes
        self._product_sum = self._product_sum * _DECAY + num_bytes * seconds
        self._rejection_factor = 1.0

    def predict(self, num_bytes: int) -> float:
        """Predicted seconds of a copy of `num_bytes`."""
        if self._weight_sum == 0:
            return 0.0
        mean_bytes, mean_s = self._bytes_sum / self._weight_sum, self._seconds_sum / self._weight_sum
        variance = self._squared_bytes_sum / self._weight_sum - mean_bytes * mean_bytes
        covariance = self._product_sum / self._weight_sum - mean_bytes * mean_s
        if variance <= 1e-6 * mean_bytes * mean_bytes:
            # All copies had one size, so the rate is unknown. Predict a short time, so that another size is tried.
            return self._rejection_factor * mean_s * min(1.0, num_bytes / mean_bytes)
        # If the line is not plausible, assume that the time is proportional to the size.
        s_per_byte = covariance / variance
        fixed_s = mean_s - s_per_byte * mean_bytes
        if s_per_byte <= 0 or fixed_s < 0:
            s_per_byte, fixed_s = mean_s / mean_bytes, 0.0
        return self._rejection_factor * (fixed_s + s_per_byte * num_bytes)

    def reject(self) -> None:
        """Record that a copy was not made, because it would have taken too long."""
        self._rejection_factor *= _DECAY_WITHOUT_COPIES
