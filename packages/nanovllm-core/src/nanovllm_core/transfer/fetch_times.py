"""Predicts from the times of earlier fetches whether a fetch of a prompt is fast enough."""

# Largest predicted ratio (see `FetchTimes`) at which a fetch starts. The maximum is above 1, because computing a prompt
# delays running requests, but a fetch does not.
MAX_FETCH_RATIO = 2.0
# Weight of the newest fetch in the estimate.
_NEWEST_WEIGHT = 0.5
# Each decision against a fetch multiplies the estimate by this factor, so that fetches are tried again.
_DECAY_WITHOUT_FETCHES = 0.95
# Larger ratios of one fetch count as this number. Thus even after slow fetches, at most 28 prompts are computed before
# the next fetch.
_MAX_RATIO = 8.0


class FetchTimes:
    """Estimates a ratio: the time of a fetch divided by the time of the steps that would compute the tokens.

    Numbers of tokens between two consecutive powers of two share an estimate. Short prompts have a large ratio, because
    every fetch has a fixed cost. If the peer is overloaded, all ratios grow. The first estimate is 1.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}

    def is_worthwhile(self, num_tokens: int) -> bool:
        """Whether to fetch `num_tokens` tokens."""
        length_class = num_tokens.bit_length()
        ratio = self._ratios.get(length_class, 1.0)
        if ratio <= MAX_FETCH_RATIO:
            return True
        self._ratios[length_class] = ratio * _DECAY_WITHOUT_FETCHES
        return False

    def observe(self, num_tokens: int, fetch_s: float, compute_s: float) -> None:
        """Add a fetch.

        fetch_s: seconds of the fetch, plus the predicted seconds of the steps that compute what did not arrive.
        compute_s: predicted seconds in which this engine would compute all `num_tokens` tokens.
        """
        length_class = num_tokens.bit_length()
        newest = min(fetch_s / compute_s, _MAX_RATIO) if compute_s > 0 else _MAX_RATIO
        previous = self._ratios.get(length_class, 1.0)
        self._ratios[length_class] = _NEWEST_WEIGHT * newest + (1 - _NEWEST_WEIGHT) * previous
