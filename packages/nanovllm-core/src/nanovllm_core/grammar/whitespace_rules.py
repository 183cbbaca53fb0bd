"""Merges the whitespace rules of a JSON grammar, so that xgrammar compiles large schemas several times faster.

xgrammar 0.2.8 writes a rule for each position that allows whitespace. The time to compile a grammar grows with the
square of the number of rules.
"""

import re
from collections.abc import Iterator

# The body of a rule that allows at most one whitespace character, as xgrammar prints it.
WHITESPACE_BODY = r'("" | ([ \n\r\t]))'
# A rule's name and the first line of the rule's body. The bodies of some structural tags have several lines.
_RULE = re.compile(r"^(\S+) ::= (.*)$", re.MULTILINE)
# Group 1 is the name of a rule. Literals and character classes match as a whole, because they may contain names.
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|([A-Za-z_][\w.-]*)|[()]')
# A name (group 1), and the element after it: the beginning of a literal (group 2) or a name (group 3).
# Groups 2 and 3 do not match an element with a quantifier, because such an element may match no text.
_NAME_AND_NEXT = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|'
    r'([A-Za-z_][\w.-]*)(?: (?:(?="(\\?[ -~])(?:\\.|[^"\\])*"(?![{*+?]))|(?=([A-Za-z_][\w.-]*)(?![\w.{*+?(-]))))?'
)
# If a literal begins with an escape, the position before the literal is merged only for these escapes.
_SHORT_ESCAPES = frozenset(['\\"', "\\\\"])


def merge_whitespace_rules(grammar: str) -> str:
    """Return an equivalent grammar in which whitespace positions with the same lookahead share a rule.

    The lookahead of a position is the next element's first character, or the next rule if the character is unknown.
    Shared rules state their lookahead, because xgrammar derives lookaheads only for rules with one use.

    grammar: xgrammar's printed EBNF.
    """
    bodies: dict[str, str] = dict(_RULE.findall(grammar))
    whitespace_names = {name for name, body in bodies.items() if body == WHITESPACE_BODY}
    prefix = "whitespace"
    while prefix in grammar:
        prefix += "_"
    shared_names: dict[str, str] = {}
    first_characters: dict[str, str | None] = {}

    def replace_name(match: re.Match[str]) -> str:
        name, character, next_name = match.groups()
        if name not in whitespace_names:
            return match[0]
        if next_name is not None:
            if next_name not in first_characters:
                first_characters[next_name] = _first_character(bodies[next_name])
            character = first_characters[next_name]
        elif character is None or (character.startswith("\\") and character not in _SHORT_ESCAPES):
            return match[0]
        lookahead = str(next_name) if character is None else f'"{character}"'
        return shared_names.setdefault(lookahead, f"{prefix}{len(shared_names)}") + match[0][len(name) :]

    other_rules = _RULE.sub(lambda match: "" if match[1] in whitespace_names else match[0], grammar)
    merged = _NAME_AND_NEXT.sub(replace_name, other_rules)
    remaining_names = {match[1] for match in _TOKEN.finditer(merged)} & whitespace_names
    rules = [f"{name} ::= {WHITESPACE_BODY}" for name in sorted(remaining_names)]
    rules += [f"{name} ::= {WHITESPACE_BODY} (=({lookahead}))" for lookahead, name in shared_names.items()]
    return "\n".join([merged, *rules])


def _first_character(body: str) -> str | None:
    """Return the character with which every text of a rule begins; None if first characters differ or are unknown."""
    elements = set(_first_elements(body))
    characters = {element[1 : 3 if element[1] == "\\" else 2] for element in elements if element[0] == '"'}
    # A body that does not begin with a parenthesis is a call, such as `Regex("a+")`: its first character is unknown.
    if not body.startswith("(") or len(characters) != 1 or any(element[0] != '"' for element in elements):
        return None
    (character,) = characters
    is_single = character[0] != "\\" or character in _SHORT_ESCAPES
    return character if is_single and " " <= character[0] <= "~" and '""' not in elements else None


def _first_elements(body: str) -> Iterator[str]:
    """Yield the first element of each alternative, and `""` for an empty alternative."""
    is_first = False
    for match in _TOKEN.finditer(body):
        element = match[0]
        if element == '""' or (is_first and element != "("):
            yield element
        is_first = element == "("
