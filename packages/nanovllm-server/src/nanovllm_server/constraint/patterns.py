"""Regular expressions that must not match a certain character: the same ones with less in them.

Reads what JSON Schema's patterns (ECMA-262) and xgrammar have in common. This room must not know what it is for.
"""

# Of escapes that stand for all characters but a few.
COMPLEMENTS = {"S": r"\s", "D": r"\d", "W": r"\w"}
# How many hexadecimal digits follow.
CODES = {"x": 2, "u": 4}


def avoid(pattern: str, character: str) -> str | None:
    """The pattern for those of its matches that don't have `character`; None if it can't be told or none are left."""
    parts: list[str] = []
    at = 0
    while at < len(pattern):
        here = pattern[at]
        if here == "[":
            end = _end_of_class(pattern, at)
            held = None if end is None else _class(pattern[at + 1 : end], character)
            if end is None or held is None:
                return None
            parts.append(held)
            at = end + 1
        elif here == ".":
            parts.append(rf"[^{character}\n\r]")
            at += 1
        elif here == "\\":
            source, kind, code = _escape(pattern, at)
            if code == ord(character) or kind in ("p", "P", "k", ""):
                return None
            parts.append(f"[^{character}{COMPLEMENTS[kind]}]" if kind in COMPLEMENTS else source)
            at += len(source)
        elif here == character:
            return None
        else:
            parts.append(here)
            at += 1
    return "".join(parts)


def _end_of_class(pattern: str, at: int) -> int | None:
    at += 1
    while at < len(pattern):
        if pattern[at] == "]":
            return at
        at += 2 if pattern[at] == "\\" else 1
    return None


def _class(inside: str, character: str) -> str | None:
    if inside.startswith("^"):
        return f"[^{character}{inside[1:]}]"
    items: list[tuple[str, int | None]] = []
    at = 0
    while at < len(inside):
        if inside[at] == "\\":
            source, kind, code = _escape(inside, at)
            if kind in COMPLEMENTS or kind in ("p", "P", ""):
                return None
            items.append((source, code))
        else:
            source = inside[at]
            items.append((source, ord(source)))
        at += len(source)
    held = _without(items, ord(character))
    return f"[{held}]" if held else None


def _without(items: list[tuple[str, int | None]], code: int) -> str:
    """The items of a class, ranges among them, but for the character of that code."""
    parts: list[str] = []
    at = 0
    while at < len(items):
        source, low = items[at]
        is_range = at + 2 < len(items) and items[at + 1][0] == "-"
        end, high = items[at + 2] if is_range else (source, low)
        at += 3 if is_range else 1
        if low is None or high is None or not low <= code <= high:
            parts.append(f"{source}-{end}" if is_range else source)
            continue
        if low < code:
            parts.append(f"{source}-{_written(code - 1)}")
        if code < high:
            parts.append(f"{_written(code + 1)}-{end}")
    return "".join(parts)


def _written(code: int) -> str:
    return rf"\u{code:04x}"


def _escape(pattern: str, at: int) -> tuple[str, str, int | None]:
    """An escape: as it stands, its letter ("" at the end of all), and the code of the one character it stands for."""
    kind = pattern[at + 1 : at + 2]
    digits = pattern[at + 2 : at + 2 + CODES.get(kind, 0)]
    if kind in CODES and len(digits) == CODES[kind] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
        return pattern[at : at + 2 + len(digits)], kind, int(digits, 16)
    is_itself = bool(kind) and not kind.isalnum()
    return pattern[at : at + 2], kind, ord(kind) if is_itself else None
