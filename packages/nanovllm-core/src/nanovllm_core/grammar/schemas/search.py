"""Searches strings for patterns, and computes the lengths that a pattern matches."""

from nanovllm_core.grammar.schemas.characters import Ranges
from nanovllm_core.grammar.schemas.regex import Alt, Anchor, Chars, Look, Node, Repeat, Seq


def found(tree: Node, text: str) -> bool:
    """Whether `tree` matches somewhere in `text`. The time is bounded by the sizes of both and repetition counts."""
    return bool(_ends(tree, text, frozenset(range(len(text) + 1))))


def _ends(node: Node, text: str, starts: frozenset[int]) -> frozenset[int]:
    """Positions at which matches that begin at one of `starts` may end."""
    match node:
        case Chars(ranges):
            return frozenset(at + 1 for at in starts if at < len(text) and _among(ord(text[at]), ranges))
        case Seq(parts):
            for part in parts:
                starts = _ends(part, text, starts)
            return starts
        case Alt(options):
            return frozenset[int]().union(*(_ends(option, text, starts) for option in options))
        case Anchor(start):
            return starts & {0 if start else len(text)}
        case Look(part, negative):
            return frozenset(at for at in starts if bool(_ends(part, text, frozenset({at}))) is not negative)
        case Repeat(part, low, high):
            ends = starts if low == 0 else frozenset[int]()
            count = 0
            while starts and (high is None or count < high):
                before = starts
                starts = _ends(part, text, starts)
                count += 1
                if count >= low:
                    if starts <= ends:
                        break
                    ends |= starts
                elif starts == before:
                    count = low - 1  # The part matches without advancing, so it can repeat any number of times.
            return ends


def _among(point: int, ranges: Ranges) -> bool:
    return any(low <= point <= high for low, high in ranges)


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most code points that `node` matches. The second is None if there is no limit."""
    match node:
        case Chars():
            return 1, 1
        case Seq(parts):
            bounds = [lengths(part) for part in parts]
            return sum(low for low, _ in bounds), _total([high for _, high in bounds])
        case Alt(options):
            bounds = [lengths(option) for option in options]
            highs = [high for _, high in bounds]
            return min((low for low, _ in bounds), default=0), None if None in highs else max(h or 0 for h in highs)
        case Repeat(part, low, high):
            least, most = lengths(part)
            return least * low, 0 if most == 0 else None if most is None or high is None else most * high
        case _:
            return 0, 0


def _total(highs: list[int | None]) -> int | None:
    total = 0
    for high in highs:
        if high is None:
            return None
        total += high
    return total
