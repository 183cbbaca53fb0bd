"""Finds stop strings in text that comes in pieces, and holds back text that may belong to one."""


class StopMatcher:
    """Finds the stop string that ends first (Knuth, Morris, Pratt 1977; one table per string).

    If two end at the same character, the longer one wins, because no part of it may be returned.
    """

    def __init__(self, stops: tuple[str, ...]):
        # Longest first, so that the first match found at a character is the longest.
        self._stops = sorted(stops, key=len, reverse=True)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Adds `text`; returns the text that can't belong to a stop string. `found` is set if one is complete."""
        self._held += text
        for end, character in enumerate(text, len(self._held) - len(text) + 1):
            for index, stop in enumerate(self._stops):
                if self._advance(index, character) == len(stop):
                    self.found = stop
                    return self._held[: end - len(stop)]
        keep = max(self._matched)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """Returns the text that is held back. Later text can't complete a stop string that began in it."""
        out, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return out

    def _advance(self, index: int, character: str) -> int:
        stop, table, matched = self._stops[index], self._tables[index], self._matched[index]
        while matched and stop[matched] != character:
            matched = table[matched - 1]
        matched += stop[matched] == character
        self._matched[index] = matched
        return matched


def _failure_table(pattern: str) -> list[int]:
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = table[matched - 1]
        matched += pattern[matched] == pattern[index]
        table[index] = matched
    return table
