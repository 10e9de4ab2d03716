"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Finds the stop string that is complete first; of several that end together, the longest.

    So the result depends on the text alone, not on its pieces. Uses the automaton of Knuth, Morris and Pratt (1977) for
    each string: linear time for any strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(dict.fromkeys(text for text in strings if text))
        self._borders = [_borders(text) for text in self._strings]
        self._matched = [0] * len(self._strings)  # characters of each string that the text ends with
        self.longest = max((len(text) for text in self._strings), default=0)

    @property
    def held(self) -> int:
        """Number of characters at the end of the text that may start a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Add text; returns the number of characters of ``text`` up to the end of the found stop string, and that
        string."""
        if not self._strings:
            return None
        for place, char in enumerate(text):
            result = ""
            for index, string in enumerate(self._strings):
                matched = self._matched[index]
                while matched and string[matched] != char:
                    matched = self._borders[index][matched - 1]
                if string[matched] == char:
                    matched += 1
                    if matched == len(string):
                        result = max(result, string, key=len)
                        matched = self._borders[index][matched - 1]
                self._matched[index] = matched
            if result:
                return place + 1, result
        return None


def _borders(text: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also a suffix."""
    borders, length = [0] * len(text), 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders
