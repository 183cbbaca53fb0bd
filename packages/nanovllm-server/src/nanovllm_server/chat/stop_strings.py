"""Finds stop strings in text that arrives in pieces."""


class StopMatcher:
    """Finds the stop string that ends first, by the search of Knuth, Morris and Pratt (1977).

    matched_stop: the stop string that was found; None before a match.
    """

    def __init__(self, stop_strings: tuple[str, ...]):
        # Longest first: if several stop strings end at the same character, `push` must match the longest.
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._failure_tables = [_failure_table(stop) for stop in self._stop_strings]
        # For each stop string: the length of its longest prefix that is a suffix of the text so far.
        self._num_matched = [0] * len(stop_strings)
        # Text that may belong to a stop string.
        self._held_text = ""
        self.matched_stop: str | None = None

    def push(self, text: str) -> str:
        """Adds `text`. Returns the text that can't belong to a stop string. Sets `matched_stop` at a match."""
        self._held_text += text
        for end, character in enumerate(text, len(self._held_text) - len(text) + 1):
            for index, stop in enumerate(self._stop_strings):
                if self._advance(index, character) == len(stop):
                    self.matched_stop = stop
                    return self._held_text[: end - len(stop)]
        num_released = len(self._held_text) - max(self._num_matched)
        released_text, self._held_text = self._held_text[:num_released], self._held_text[num_released:]
        return released_text

    def flush(self) -> str:
        """Returns the text that `push` held back. A later match does not include this text."""
        released_text, self._held_text = self._held_text, ""
        self._num_matched = [0] * len(self._stop_strings)
        return released_text

    def _advance(self, index: int, character: str) -> int:
        """Adds `character`. Returns the new length of the matched prefix of stop string `index`."""
        stop, table, num_matched = self._stop_strings[index], self._failure_tables[index], self._num_matched[index]
        while num_matched and stop[num_matched] != character:
            num_matched = table[num_matched - 1]
        num_matched += stop[num_matched] == character
        self._num_matched[index] = num_matched
        return num_matched


def _failure_table(pattern: str) -> list[int]:
    """Entry i is the length of the longest proper prefix of `pattern[: i + 1]` that is also a suffix of this text."""
    table = [0] * len(pattern)
    num_matched = 0
    for index in range(1, len(pattern)):
        while num_matched and pattern[num_matched] != pattern[index]:
            num_matched = table[num_matched - 1]
        num_matched += pattern[num_matched] == pattern[index]
        table[index] = num_matched
    return table
