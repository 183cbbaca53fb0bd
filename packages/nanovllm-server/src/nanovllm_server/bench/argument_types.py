"""Types of flag values, as argparse calls them. argparse shows the function's name when it raises ValueError."""

import argparse

from nanovllm_server.bench.workload import LengthRange
from nanovllm_server.flag_types import integer_from

integer_from_0, integer_from_1, integer_from_2 = integer_from(0), integer_from(1), integer_from(2)


def length_range(text: str) -> LengthRange:
    """`N` or `N..M`, numbers of tokens."""
    low, dots, high = text.partition("..")
    lengths = LengthRange(integer_from_1(low), integer_from_1(high if dots else low))
    if lengths.low > lengths.high:
        raise argparse.ArgumentTypeError("must go from a smaller number to a larger one")
    return lengths


def request_rate(text: str) -> float | None:
    """Requests per second, above 0. None for `inf`: all requests at once."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return None if value == float("inf") else value


def assignment(text: str) -> tuple[str, str]:
    """`KEY=VALUE` as a pair."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value
