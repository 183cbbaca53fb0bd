"""Functions that parse command-line values for argparse, and the format of help texts."""

import argparse
import math
from collections.abc import Callable


def integer_in_range(low: int, high: int | None = None) -> Callable[[str], int]:
    """Returns a parser of integers from `low` to `high` (None: no upper bound)."""

    def integer(text: str) -> int:
        value = int(text)
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"must be at least {low}" + (f" and at most {high}" if high else ""))
        return value

    return integer


def positive_number(text: str) -> float:
    """Parses a finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return value


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of a flag, unless the default is None, False or empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_no_default = action.default is False or action.default in (None, [None], [], "")
        return action.help if has_no_default else super()._get_help_string(action)
