"""Types and defaults of command-line values.

Each function parses one value and raises what argparse reports to the user.
"""

import argparse

from nanovllm_server.bench.workload import Lengths
from nanovllm_server.flag_types import integer_from

DEFAULT_URL = "http://127.0.0.1:8000/v1"


non_negative, positive, at_least_two = integer_from(0), integer_from(1), integer_from(2)


def lengths(text: str) -> Lengths:
    """`N` or `N..M`, numbers of tokens."""
    low, dots, high = text.partition("..")
    parsed = Lengths(positive(low), positive(high if dots else low))
    if parsed.low > parsed.high:
        raise argparse.ArgumentTypeError("must go from a smaller number to a larger one")
    return parsed


def rate(text: str) -> float | None:
    """A number above 0; `inf` becomes None."""
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
