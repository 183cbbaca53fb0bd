"""Types of flag values, as argparse calls them. argparse shows the function's name when it raises ValueError."""

import argparse
from collections.abc import Callable

from nanovllm_server.bench.workload import LengthRange


def integer_from(minimum: int) -> Callable[[str], int]:
    """A type of integers that are at least `minimum`."""

    def integer(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return value

    return integer


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


def duration(text: str) -> float:
    """A finite number above 0, in the unit of the flag."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return value


def assignment(text: str) -> tuple[str, str]:
    """`KEY=VALUE` as a pair."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError("must be KEY=VALUE")
    return key, value
