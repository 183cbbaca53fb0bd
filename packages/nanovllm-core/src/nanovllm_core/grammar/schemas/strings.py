"""Writes the strings of a `Text` shape as one pattern for xgrammar."""

from collections.abc import Collection
from dataclasses import dataclass, field

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.characters import PLAIN, invert, normalized
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.formats import FORMATS
from nanovllm_core.grammar.schemas.regex import Alt, Chars, Node, Repeat, Seq, full_match, narrow, parse
from nanovllm_core.grammar.schemas.shapes import Text, keyword_place
from nanovllm_core.grammar.schemas.spelling import write, write_value

MAX_LENGTH = 1_000_000
# Limits of the trie in `all_but`: its depth in characters, and its number of prefixes.
MAX_BRANCH = 32
MAX_BRANCHES = 16


def format_pattern(name: str) -> str | None:
    """The pattern of a format; None if the format is not enforced."""
    pattern = FORMATS.get(name)
    return None if pattern is None else write(narrow(full_match(parse(pattern)), PLAIN))


def as_text(shape: Text, place: str) -> str | None:
    """The pattern of a shape's strings for xgrammar; None if there are no strings. Raises SchemaError."""
    tree = as_tree(shape, place)
    return None if tree == regex.NOTHING else write_value(tree)


def as_tree(shape: Text, place: str) -> Node:
    """The regex tree of a shape's strings, restricted to characters that JSON does not escape. Raises SchemaError."""
    keyword = next((k for k, _ in shape.places if k in ("pattern", "maxLength", "minLength")), "pattern")
    at = keyword_place(shape, keyword) or place
    if len(shape.patterns) > 1:
        raise SchemaError(at, "pattern", "can't be enforced together with another pattern")
    if shape.absent_patterns:
        raise SchemaError(at, "not", "of a pattern can't be enforced")
    try:
        tree: Node = full_match(parse(next(iter(shape.patterns)))) if shape.patterns else regex.ANYTHING
        tree = narrow(tree, PLAIN)
    except regex.RegexError as error:
        raise SchemaError(at, "pattern", f"has a pattern that can't be enforced: {error}") from error
    if shape.low or shape.high is not None:
        limited = limit(tree, shape.low, shape.high)
        if limited is None:
            raise SchemaError(at, keyword, "can't be enforced together with this pattern")
        tree = limited
    if shape.excluded:
        if tree != narrow(regex.ANYTHING, PLAIN):
            hidden = [text for text in shape.excluded if _matches(tree, text)]
            if hidden:
                raise SchemaError(at, "not", "of single strings can't be enforced together with a pattern or length")
            return tree
        tree = all_but(shape.excluded)
    return tree


def _matches(tree: Node, text: str) -> bool:
    return search.is_found(regex.seq([regex.Anchor(True), tree, regex.Anchor(False)]), text)


def limit(tree: Node, low: int, high: int | None) -> Node | None:
    """Restricts `tree` to strings of `low` to `high` code points; None if this function can't express it."""
    least, most = search.lengths(tree)
    if least >= low and (high is None or (most is not None and most <= high)):
        return tree
    if (high is not None and least > high) or (most is not None and most < low):
        return regex.NOTHING
    match tree:
        case Alt(options):
            limited = [limit(option, low, high) for option in options]
            if any(option is None for option in limited):
                return None
            kept = tuple(option for option in limited if option is not None and option != regex.NOTHING)
            return kept[0] if len(kept) == 1 else Alt(kept)
        case Repeat(Chars() as part, fewest, most_times):
            limit_high = high if most_times is None else most_times if high is None else min(high, most_times)
            return Repeat(part, max(low, fewest), None if limit_high is None else min(limit_high, MAX_LENGTH))
        case Seq(parts):
            return _limit_one(parts, low, high)
        case _:
            return None


def _limit_one(parts: tuple[Node, ...], low: int, high: int | None) -> Node | None:
    """Applies the limits to the only part that varies in length; None if several do."""
    varying = [index for index, part in enumerate(parts) if len(set(search.lengths(part))) > 1]
    if len(varying) != 1:
        return None
    index = varying[0]
    fixed = sum(search.lengths(part)[0] for other, part in enumerate(parts) if other != index)
    inner = limit(parts[index], max(low - fixed, 0), None if high is None else high - fixed)
    if inner is None or inner == regex.NOTHING:
        return inner
    return regex.seq([*parts[:index], inner, *parts[index + 1 :]])


@dataclass(slots=True)
class _Branch:
    """A node of the trie of excluded strings.

    ends: an excluded string ends here.
    cut: the trie ends here although an excluded string goes on, so all strings with this prefix are excluded.
    """

    ends: bool = False
    cut: bool = False
    next: "dict[str, _Branch]" = field(default_factory=dict)


def all_but(texts: Collection[str]) -> Node:
    """All strings without escapes except `texts`. If `texts` are many or long, excludes others too."""
    longest = MAX_BRANCH
    while longest > 1 and len({text[:length] for text in texts for length in range(longest)}) > MAX_BRANCHES:
        longest //= 2
    root = _Branch()
    for text in texts:
        branch = root
        for character in text[:longest]:
            branch = branch.next.setdefault(character, _Branch())
        branch.ends = True
        branch.cut |= len(text) > longest
    return narrow(_outside(root), PLAIN)


def _outside(branch: _Branch) -> Node:
    if branch.cut:
        return regex.NOTHING
    known = normalized([(ord(character), ord(character)) for character in branch.next])
    options: list[Node] = [] if branch.ends else [regex.EMPTY]
    options.append(regex.seq([Chars(invert(known)), regex.ANYTHING]))
    for character, child in branch.next.items():
        options.append(regex.seq([Chars(((ord(character), ord(character)),)), _outside(child)]))
    return options[0] if len(options) == 1 else Alt(tuple(options))
