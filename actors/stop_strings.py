"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Watches a text for the stop string that is complete first; of those that end together, the longest.

    That makes the result a matter of the text alone, not of how it is cut into pieces. Knuth, Morris and Pratt's
    automaton (1977) for each string: linear time, whatever the strings.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(dict.fromkeys(text for text in strings if text))
        self._borders = [_borders(text) for text in self._strings]
        self._matched = [0] * len(self._strings)  # characters of each string that the text ends with
        self.longest = max((len(text) for text in self._strings), default=0)

    @property
    def held(self) -> int:
        """How many characters at the end of the text may be the start of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Watch more text. The stop string found, and how many characters of `text` there are up to its end."""
        if not self._strings:
            return None
        for place, char in enumerate(text):
            found = ""
            for index, string in enumerate(self._strings):
                matched = self._matched[index]
                while matched and string[matched] != char:
                    matched = self._borders[index][matched - 1]
                if string[matched] == char:
                    matched += 1
                    if matched == len(string):
                        found = max(found, string, key=len)
                        matched = self._borders[index][matched - 1]
                self._matched[index] = matched
            if found:
                return place + 1, found
        return None


def _borders(text: str) -> list[int]:
    """Of each prefix, the length of the longest shorter one that is also its end."""
    borders, length = [0] * len(text), 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders
