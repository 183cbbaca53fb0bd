"""Writes a pattern for xgrammar that matches the strings of a `StringShape`, except strings with JSON escapes."""

from bisect import bisect_right
from collections.abc import Collection

from nanovllm_core.grammar.schemas import regex, search
from nanovllm_core.grammar.schemas.characters import invert_ranges, normalize_ranges
from nanovllm_core.grammar.schemas.document import SchemaError
from nanovllm_core.grammar.schemas.formats import FORMATS
from nanovllm_core.grammar.schemas.pattern_writer import write_json_string_pattern
from nanovllm_core.grammar.schemas.shapes import StringShape, keyword_place

# Maximum number of repetitions of a character in a written pattern.
MAX_REPETITIONS = 1_000_000
# Number of characters that each repeated part of a shortened format may have, see `_shorten_format`.
MIN_PART_LENGTH = 16
# Maximum length of the prefixes in `exclude_strings`, in characters.
MAX_PREFIX_LENGTH = 32
# Maximum number of these prefixes. Compiling a prefix takes 7 ms.
MAX_PREFIXES = 6
# The maximum for property names in later objects of a schema, see `MAX_EXACT_OBJECTS` in `undeclared_properties.py`.
MAX_LATER_PREFIXES = 1


def string_pattern(shape: StringShape, place: str, count_steps: search.CountSteps) -> str | None:
    """The pattern of a shape's strings; None if the shape has no strings. Raises SchemaError."""
    tree = string_tree(shape, place, count_steps)
    return None if tree == regex.NO_STRING else write_json_string_pattern(tree)


def string_tree(shape: StringShape, place: str, count_steps: search.CountSteps) -> regex.Node:
    """The regex tree of a shape's strings, without strings that need escapes in JSON. Raises SchemaError."""
    keyword = next((name for name, _ in shape.places if name in ("pattern", "maxLength", "minLength")), "pattern")
    error_place = keyword_place(shape, keyword) or place
    if len(shape.patterns) > 1:
        raise SchemaError(error_place, "pattern", "can't be enforced together with another pattern")
    if shape.forbidden_patterns:
        raise SchemaError(error_place, "not", "can't be enforced for a pattern")
    try:
        tree: regex.Node = regex.ANY_STRING
        for pattern in _find_patterns(shape):
            tree = regex.convert_to_full_match(regex.parse(pattern))
        tree = regex.restrict_characters(tree)
    except regex.RegexError as error:
        raise SchemaError(error_place, "pattern", f"has a pattern that can't be enforced: {error}") from error
    if shape.low > MAX_REPETITIONS:
        problem = f"is above {MAX_REPETITIONS}, which is not supported"
        raise SchemaError(keyword_place(shape, "minLength") or place, "minLength", problem)
    if shape.low or shape.high is not None:
        limited = limit_length(tree, shape.low, shape.high)
        if limited is None and not shape.patterns:
            limited = _shorten_format(tree, shape.low, shape.high)
        if limited is None:
            kind = "pattern" if shape.patterns else "format"
            raise SchemaError(error_place, keyword, f"can't be enforced together with this {kind}")
        tree = limited
    if shape.excluded:
        if tree == regex.restrict_characters(regex.ANY_STRING):
            return exclude_strings(sorted(shape.excluded))
        if any(search.matches_whole(tree, text, count_steps) for text in shape.excluded):
            problem = "can't exclude single strings together with a pattern, format or length"
            raise SchemaError(error_place, "not", problem)
    return tree


def _find_patterns(shape: StringShape) -> Collection[str]:
    """The shape's patterns, or the pattern of its format: libraries such as Zod write a format as a pattern too."""
    if not shape.patterns and shape.format in FORMATS:
        return [FORMATS[shape.format]]
    return shape.patterns


def limit_length(tree: regex.Node, low: int, high: int | None) -> regex.Node | None:
    """Restricts `tree` to strings of `low` to `high` code points. Returns None if this is not supported."""
    min_length, max_length = search.match_lengths(tree)
    if min_length >= low and (high is None or (max_length is not None and max_length <= high)):
        return tree
    if (high is not None and min_length > high) or (max_length is not None and max_length < low):
        return regex.NO_STRING
    match tree:
        case regex.Alternation(options):
            limited = [limit_length(option, low, high) for option in options]
            if any(option is None for option in limited):
                return None
            remaining = tuple(option for option in limited if option is not None and option != regex.NO_STRING)
            return remaining[0] if len(remaining) == 1 else regex.Alternation(remaining)
        case regex.Repeat(regex.CharacterSet() as part, min_times, max_times):
            max_count = high if max_times is None else max_times if high is None else min(high, max_times)
            return regex.Repeat(
                part, max(low, min_times), None if max_count is None else min(max_count, MAX_REPETITIONS)
            )
        case regex.Concatenation(parts):
            return _limit_varying_part(parts, low, high)
        case _:
            return None


def _shorten_format(tree: regex.Node, low: int, high: int | None) -> regex.Node | None:
    """Limits all repetitions, so that no string has more than `high` code points. Returns None if this is impossible.

    The result lacks some strings of permitted length. If repeated groups leave less than MIN_PART_LENGTH characters for
    each part, they are limited to one repetition.
    """
    if high is None or search.match_lengths(tree)[0] < low:
        return None
    for max_groups in (None, 1):

        def max_length(max_count: int, max_groups: int | None = max_groups) -> int:
            return search.match_lengths(_limit_repetitions(tree, max_count, max_groups))[1] or 0

        max_count = bisect_right(range(min(high, MAX_REPETITIONS) + 1), high, key=max_length) - 1
        if max_count >= (MIN_PART_LENGTH if max_groups is None else 0):
            return _limit_repetitions(tree, max_count, max_groups)
    return None


def _limit_repetitions(node: regex.Node, max_count: int, max_groups: int | None) -> regex.Node:
    """Limits each repetition to `max_count`, and repetitions of parts of variable length also to `max_groups`."""
    match node:
        case regex.Concatenation(parts):
            return regex.Concatenation(tuple(_limit_repetitions(part, max_count, max_groups) for part in parts))
        case regex.Alternation(options):
            return regex.Alternation(tuple(_limit_repetitions(option, max_count, max_groups) for option in options))
        case regex.Repeat(regex.Alternation(options), low, None):
            # The grammar counts single characters fast, but takes 300 ms per mask to count longer options.
            characters = next(option for option in options if isinstance(option, regex.CharacterSet))
            return regex.Repeat(characters, low, max(low, max_count))
        case regex.Repeat(part, low, high):
            limits = max_count, high, None if isinstance(part, regex.CharacterSet) else max_groups
            limit = min(limit for limit in limits if limit is not None)
            return regex.Repeat(_limit_repetitions(part, max_count, max_groups), low, max(low, limit))
        case _:
            return node


def _limit_varying_part(parts: tuple[regex.Node, ...], low: int, high: int | None) -> regex.Node | None:
    """Restricts the total length by limiting the only part of variable length. Returns None if several parts vary."""
    varying = [index for index, part in enumerate(parts) if len(set(search.match_lengths(part))) > 1]
    if len(varying) != 1:
        return None
    index = varying[0]
    fixed_length = sum(search.match_lengths(part)[0] for other, part in enumerate(parts) if other != index)
    limited = limit_length(parts[index], max(low - fixed_length, 0), None if high is None else high - fixed_length)
    if limited is None or limited == regex.NO_STRING:
        return limited
    return regex.concatenate([*parts[:index], limited, *parts[index + 1 :]])


def exclude_strings(texts: Collection[str], max_prefixes: int = MAX_PREFIXES) -> regex.Node:
    """A regex tree that matches all strings except `texts`. It excludes further strings if `texts` are many or long."""
    max_length, num_prefixes = 1, 1
    while max_length < MAX_PREFIX_LENGTH:
        num_prefixes += len({text[:max_length] for text in texts if len(text) >= max_length})
        if num_prefixes > max_prefixes:
            break
        max_length += 1
    return regex.restrict_characters(_strings_outside(texts, max_length))


def _strings_outside(texts: Collection[str], max_length: int) -> regex.Node:
    """All strings except `texts`, and except strings that begin with the first `max_length` characters of a text."""
    if max_length == 0 and any(texts):
        return regex.NO_STRING
    suffixes_by_character: dict[str, list[str]] = {}
    for text in texts:
        if text:
            suffixes_by_character.setdefault(text[0], []).append(text[1:])
    next_characters = normalize_ranges([(ord(character), ord(character)) for character in suffixes_by_character])
    options: list[regex.Node] = [] if "" in texts else [regex.EMPTY_STRING]
    options.append(regex.concatenate([regex.CharacterSet(invert_ranges(next_characters)), regex.ANY_STRING]))
    for character, suffixes in suffixes_by_character.items():
        character_set = regex.CharacterSet(((ord(character), ord(character)),))
        options.append(regex.concatenate([character_set, _strings_outside(suffixes, max_length - 1)]))
    return options[0] if len(options) == 1 else regex.Alternation(tuple(options))
