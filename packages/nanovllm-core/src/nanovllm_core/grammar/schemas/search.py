"""Searches strings for matches of a regex tree, and finds the minimum and maximum length of a match."""

from collections.abc import Callable

from nanovllm_core.grammar.schemas import regex
from nanovllm_core.grammar.schemas.characters import Ranges

# Adds to the steps of one schema's conversion. Raises SchemaError above the limit.
CountSteps = Callable[[int], None]
# Number of string positions that a search counts as one step.
POSITIONS_PER_STEP = 8


def is_found(tree: regex.Node, text: str, count_steps: CountSteps) -> bool:
    """Whether a part of `text` matches `tree`. The search does not backtrack."""
    return bool(_match_ends(tree, text, frozenset(range(len(text) + 1)), count_steps))


def matches_whole(tree: regex.Node, text: str, count_steps: CountSteps) -> bool:
    """Whether all of `text` matches `tree`."""
    return len(text) in _match_ends(tree, text, frozenset({0}), count_steps)


def _match_ends(node: regex.Node, text: str, starts: frozenset[int], count_steps: CountSteps) -> frozenset[int]:
    """The possible end positions of matches that begin at one of `starts`."""
    count_steps(1 + len(starts) // POSITIONS_PER_STEP)
    match node:
        case regex.CharacterSet(ranges):
            return frozenset(
                position + 1 for position in starts if position < len(text) and _contains(ord(text[position]), ranges)
            )
        case regex.Concatenation(parts):
            for part in parts:
                starts = _match_ends(part, text, starts, count_steps)
            return starts
        case regex.Alternation(options):
            return frozenset[int]().union(*(_match_ends(option, text, starts, count_steps) for option in options))
        case regex.Anchor(is_start):
            return starts & {0 if is_start else len(text)}
        case regex.Lookahead(part, is_negative):
            return frozenset(
                position
                for position in starts
                if bool(_match_ends(part, text, frozenset({position}), count_steps)) is not is_negative
            )
        case regex.Repeat(part, low, high):
            ends = starts if low == 0 else frozenset[int]()
            count = 0
            while starts and (high is None or count < high):
                previous_starts = starts
                starts = _match_ends(part, text, starts, count_steps)
                count_steps(len(ends) // POSITIONS_PER_STEP)
                count += 1
                if count >= low:
                    if starts <= ends:
                        break
                    ends |= starts
                elif starts == previous_starts:
                    count = low - 1  # More repetitions change nothing, so skip to the last required repetition.
            return ends


def _contains(code_point: int, ranges: Ranges) -> bool:
    return any(low <= code_point <= high for low, high in ranges)


def match_lengths(node: regex.Node) -> tuple[int, int | None]:
    """Returns (minimum, maximum) of a match's length in code points. A maximum of None means no limit."""
    match node:
        case regex.CharacterSet():
            return 1, 1
        case regex.Concatenation(parts):
            bounds = [match_lengths(part) for part in parts]
            return sum(low for low, _ in bounds), _sum_or_none([high for _, high in bounds])
        case regex.Alternation(options):
            bounds = [match_lengths(option) for option in options]
            highs = [high for _, high in bounds if high is not None]
            min_length = min((low for low, _ in bounds), default=0)
            return min_length, max(highs, default=0) if len(highs) == len(bounds) else None
        case regex.Repeat(part, low, high):
            min_length, max_length = match_lengths(part)
            return (
                min_length * low,
                0 if max_length == 0 else None if max_length is None or high is None else max_length * high,
            )
        case _:
            return 0, 0


def _sum_or_none(highs: list[int | None]) -> int | None:
    known = [high for high in highs if high is not None]
    return sum(known) if len(known) == len(highs) else None
