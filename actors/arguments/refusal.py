"""Names that are known from other engines and do nothing here yet: each is refused with the reason.

A value that asks for exactly what this engine does anyway (``--tensor-parallel-size 1``) is accepted: the recipe it
came from then works unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.arguments.argument import parse_flag
from actors.arguments.errors import ArgumentError

__all__ = ["Refusal", "family"]


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refused argument; ``accepts`` are the values that change nothing.

    A name that ends with a star stands for every name that begins so.
    """

    name: str
    aliases: tuple[str, ...] = ()
    is_flag: bool = False
    takes_many: bool = False  # the command line gives it all the words up to the next name
    accepts: tuple[object, ...] = ()
    group: str
    reason: str  # a clause: "LoRA adapters are not built yet"
    remedy: str  # an imperative: "leave it out"

    def check(self, given: object) -> None:
        """Raise ArgumentError unless the value is one of those that change nothing, or None for "left out"."""
        if given is None or any(_same(given, accepted) for accepted in self.accepts):
            return
        raise ArgumentError(f"{self.reason}; {self.remedy}")


def _same(given: object, accepted: object) -> bool:
    if isinstance(accepted, bool):
        return parse_flag(given) is accepted
    if accepted is None:
        return isinstance(given, str) and given.strip().lower() in ("none", "null", "")
    if isinstance(accepted, int | float):
        try:
            return not isinstance(given, bool) and float(str(given)) == accepted
        except ValueError:
            return False
    return str(given).strip() == str(accepted)


def family(
    group: str,
    reason: str,
    remedy: str,
    *,
    flags: tuple[str, ...] = (),
    values: Mapping[str, object] | None = None,
    lists: tuple[str, ...] = (),
) -> tuple[Refusal, ...]:
    """The arguments of one feature that is not there.

    ``flags`` are accepted when false; ``values`` map a name (its aliases after it, separated by spaces) to the value
    that means "off" or has no effect while the feature is; ``lists`` take several words and are accepted when empty.
    """

    def refusal(names: str, *accepts: object, is_flag: bool = False, takes_many: bool = False) -> Refusal:
        name, *aliases = names.split()
        return Refusal(
            name=name,
            aliases=tuple(aliases),
            is_flag=is_flag,
            takes_many=takes_many,
            accepts=accepts,
            group=group,
            reason=reason,
            remedy=remedy,
        )

    return (
        *(refusal(names, False, is_flag=True) for names in flags),
        *(refusal(names, None, default) for names, default in (values or {}).items()),
        *(refusal(names, None, "[]", takes_many=True) for names in lists),
    )
