"""Functions that parse flag values. Argparse shows the function's name in its error: `invalid integer_range value`."""

import argparse
from collections.abc import Callable

from nanovllm_server.bench.workload import IntegerRange
from nanovllm_server.flag_types import integer_in_range

integer_at_least_0, integer_at_least_1, integer_at_least_2 = map(integer_in_range, (0, 1, 2))


def integer_range(text: str) -> IntegerRange:
    """Parses `N` or `N..M`, of integers from 1."""
    return _parse_range(text, integer_at_least_1)


def step_range(text: str) -> IntegerRange:
    """Parses `N` or `N..M`, of step numbers, which begin at 0."""
    return _parse_range(text, integer_at_least_0)


def request_rate(text: str) -> float | None:
    """Parses a number of requests per second. Returns None for `inf`, which sends all requests at once."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return None if value == float("inf") else value


def finite_rates(text: str) -> tuple[float, ...]:
    """Parses finite numbers of requests per second, separated by commas. 0 is allowed."""
    rates = tuple(float(rate) for rate in text.split(","))
    if not all(0 <= rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError("must be at least 0 and finite")
    return rates


def assignment(text: str) -> tuple[str, str]:
    """Parses `KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value


def _parse_range(text: str, parse_bound: Callable[[str], int]) -> IntegerRange:
    low, dots, high = text.partition("..")
    bounds = IntegerRange(parse_bound(low), parse_bound(high if dots else low))
    if bounds.low > bounds.high:
        raise argparse.ArgumentTypeError("must go from a smaller number to a larger one")
    return bounds
