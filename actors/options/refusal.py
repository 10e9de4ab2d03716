"""Refusals of arguments of other engines that are not supported here, each with its reason.

A value that requests what this engine does anyway (``--data-parallel-size 1``) is accepted, so that recipes of other
engines work unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from actors.options.argument import parse_flag
from actors.options.errors import ArgumentError

__all__ = ["Refusal", "RefusedNames"]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refused argument. ``accepts``: values that change nothing. A star at the end of a name matches any suffix."""

    name: str
    aliases: tuple[str, ...] = ()
    is_flag: bool = False
    takes_many: bool = False  # the command line passes all words up to the next name
    accepts: tuple[object, ...] = ()
    means: dict[str, str] = {}  # value -> name of the flag that it sets
    group: str
    reason: str  # a clause: "LoRA adapters are not built yet"
    remedy: str  # an imperative: "leave it out"

    def meaning(self, value: object) -> str | None:
        """The name of the flag that the value sets."""
        return self.means.get(value) if isinstance(value, str) else None

    def check(self, value: object) -> None:
        """Raise ArgumentError unless the value changes nothing or is None, which means that it was left out."""
        if value is None or any(_same(value, accepted) for accepted in self.accepts):
            return
        raise ArgumentError(f"{self.reason}; {self.remedy}")


def _same(value: object, accepted: object) -> bool:
    if isinstance(accepted, bool):
        return parse_flag(value) is accepted
    if accepted is None:
        return isinstance(value, str) and value.strip().lower() in ("none", "null", "")
    if isinstance(accepted, int | float):
        try:
            return not isinstance(value, bool) and float(str(value)) == accepted
        except ValueError:
            return False
    return str(value).strip() == str(accepted)


class RefusedNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names that are refused for one reason, grouped by the values that are accepted nevertheless.

    ``flags``: flags that may be false. ``always``: flags that may be true. ``either``: flags that may be either, since
    they change nothing. ``unset``: options that take no value at all. ``values``: options and the one value that they
    take, which means "off". ``lists``: options of several words, which take none. ``only``: options and the values that
    they take. ``means``: options and the flags, also by their --no- forms, that some of their values set.
    """

    group: str
    reason: str
    remedy: str
    flags: tuple[str, ...] = ()
    always: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    unset: tuple[str, ...] = ()
    values: dict[str, object] = {}
    lists: tuple[str, ...] = ()
    only: dict[str, tuple[object, ...]] = {}
    means: dict[str, dict[str, str]] = {}

    def refusals(self) -> Iterator[Refusal]:
        """A refusal for each name."""
        by_value: list[tuple[tuple[object, ...], tuple[str, ...]]]
        by_value = [((False,), self.flags), ((True,), self.always), ((True, False), self.either)]
        for accepted, flags in by_value:
            for names in flags:
                yield self._refusal(names, accepted, is_flag=True)
        for names in self.unset:
            yield self._refusal(names, (None, None))
        for names, value in self.values.items():
            yield self._refusal(names, (None, value))
        for names in self.lists:
            yield self._refusal(names, (None, "[]"), takes_many=True)
        for names, accepted in self.only.items():
            yield self._refusal(names, accepted)

    def _refusal(
        self, names: str, accepts: tuple[object, ...], *, is_flag: bool = False, takes_many: bool = False
    ) -> Refusal:
        name, *aliases = names.split()
        return Refusal(
            name=name,
            aliases=tuple(aliases),
            is_flag=is_flag,
            takes_many=takes_many,
            accepts=accepts,
            means=self.means.get(name, {}),
            group=self.group,
            reason=self.reason,
            remedy=self.remedy,
        )
