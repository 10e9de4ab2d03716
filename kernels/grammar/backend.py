"""The interface to a library that knows grammars."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings

__all__ = [
    "MAX_WHITESPACE",
    "Bits",
    "Compiled",
    "GrammarBackend",
    "Matcher",
    "read_tags",
    "tokenizer_json",
]

Bits = npt.NDArray[np.int32]
"""A bit for each token, 32 to a word, the lowest first: whether it is allowed."""

MAX_WHITESPACE = 16
"""White space characters between two parts of JSON. A model that repeats itself would otherwise never end."""


class Matcher(Protocol):
    """The state of one text. Not thread safe."""

    def follow(self, token: int) -> bool:
        """Advance by a token. False: the grammar does not allow it, and the state is of no further use."""
        ...

    def accept(self, token: int) -> bool:
        """Advance by a token. False: the grammar does not allow it; the state is unchanged."""
        ...

    def rollback(self, tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def forced(self) -> list[int]:
        """The next tokens, where the grammar allows one text only: most likely the tokens of this text, which are not
        the only ones that a backend allows. May be empty all the same."""
        ...

    def certain(self) -> list[int]:
        """The next tokens, where the mask of each allows it alone. May be empty all the same."""
        ...

    def fill(self, row: Bits) -> None:
        """Write which tokens are allowed next, end-of-text tokens among them where the text may end. Raises
        GrammarError where the grammar is too much for the library."""
        ...


Compiled = Callable[[], Matcher]
"""Makes the state of a new text. Thread safe."""


class GrammarBackend(Protocol):
    def compile(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError. Thread safe; it holds the interpreter's lock only briefly."""
        ...


def tokenizer_json(settings: GrammarSettings) -> str:
    given = settings.tokenizer
    return given if given.lstrip().startswith("{") else Path(given).read_text(encoding="utf-8")


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: dict[str, Any] | bool = {}


class _Tags(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


def read_tags(text: str) -> _Tags:
    """A structural tag, checked. Raises GrammarError."""
    try:
        tags = msgspec.json.decode(text, type=_Tags)
    except msgspec.DecodeError as error:
        raise GrammarError(f"not a structural tag: {error}") from error
    if not tags.structures or not tags.triggers:
        raise GrammarError("a structural tag needs at least one structure and one trigger")
    for tag in tags.structures:
        result = [trigger for trigger in tags.triggers if trigger and tag.begin.startswith(trigger)]
        if len(result) != 1:
            raise GrammarError(f"begin {tag.begin[:80]!r} must start with exactly one of the triggers")
    return tags
