"""ArgumentSpec: declares an argument at its field, so that each argument is declared once.

    port: Annotated[int, ArgumentSpec(group="HTTP server", minimum=0, maximum=65535, help="TCP port to listen on.")] =
    8000

Name, default, kind and choices come from the field; :func:`declared` builds the table of arguments from all fields.
"""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

import msgspec

from actors.options.argument import Argument, Group, Kind, Number

__all__ = ["ArgumentSpec", "declared"]


class ArgumentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The part of an argument that its field's name, type and default do not determine. For the fields see
    :class:`Argument`.

    ``kind``: only if the type is ambiguous: a tuple of str is "words", or "names" (separated by commas only).
    """

    group: Group
    help: str
    kind: Literal["names"] | None = None
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()
    default_text: str = ""
    metavar: str = ""
    synonyms: dict[str, str] = {}
    unbuilt_choices: dict[str, str] = {}
    minimum: Number | None = None
    maximum: Number | None = None
    above: bool = False
    also: tuple[Number, ...] = ()
    secret: bool = False
    server_only: bool = False


def declared(options: type[msgspec.Struct]) -> tuple[Argument, ...]:
    """The arguments of a struct, in the order of its fields. Raises TypeError for a field without an ArgumentSpec or of
    a type that the command line cannot express."""
    hints = typing.get_type_hints(options, include_extras=True)
    return tuple(_argument(field, hints[field.name]) for field in msgspec.structs.fields(options))


def _argument(field: msgspec.structs.FieldInfo, hint: Any) -> Argument:
    option = next((extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, ArgumentSpec)), None)
    if option is None:
        raise TypeError(f"{field.name} declares no ArgumentSpec: write its type as Annotated[..., ArgumentSpec(...)]")
    kind, choices = _kind(field.name, typing.get_args(hint)[0])
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    fields = {name: getattr(option, name) for name in ArgumentSpec.__struct_fields__ if name != "kind"}
    return Argument(
        name=field.name.replace("_", "-"), kind=option.kind or kind, choices=choices, default=default, **fields
    )


_KINDS: dict[object, Kind] = {bool: "flag", int: "int", float: "float", str: "str", dict: "json"}
_TUPLES: dict[object, Kind] = {int: "ints", float: "floats", str: "words"}


def _kind(name: str, hint: Any) -> tuple[Kind, tuple[str, ...]]:
    """Kind and choices of a type, ignoring ``| None``."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    kinds, member = _KINDS, hint
    if typing.get_origin(hint) is tuple:
        kinds, member = _TUPLES, typing.get_args(hint)[0]
    choices: tuple[str, ...] = ()
    if typing.get_origin(member) is Literal:
        choices, member = typing.get_args(member), str
    kind = kinds.get(typing.get_origin(member) or member)
    if kind is None:
        raise TypeError(f"{name}: a value of type {hint} cannot be given on a command line")
    return kind, choices
