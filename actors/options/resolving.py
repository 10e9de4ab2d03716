"""Resolves names and values as users write them to the fields of Arguments."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import msgspec

from actors.options.additional_config import split_additional_config, split_eplb_config
from actors.options.argument import Argument, parse_flag
from actors.options.compilation_config import split_compilation_config
from actors.options.errors import ArgumentError
from actors.options.refusal import Refusal
from actors.options.refused import REFUSALS
from actors.options.speculative_config import split_config
from actors.options.table import ARGUMENTS
from actors.options.vllm_nodes import NODE_NAMES, OTHER_BALANCERS, READ_NAMES, node_arguments

__all__ = ["RawArgument", "ResolvedName", "canonical", "find", "resolve"]


class RawArgument(msgspec.Struct, frozen=True):
    """A name and a value from one source. ``spelling``: the name and its source in error messages."""

    name: str
    value: object
    spelling: str


class ResolvedName(msgspec.Struct, frozen=True):
    """The meaning of a name: an argument or a refused one. ``reverse``: whether the name sets the flag to false."""

    entry: Argument | Refusal
    reverse: bool = False


def _index() -> dict[str, ResolvedName]:
    index: dict[str, ResolvedName] = {}

    def add(name: str, resolved: ResolvedName) -> None:
        if name in index:
            raise RuntimeError(f"two arguments are named {name}")
        index[name] = resolved

    entries: tuple[Argument | Refusal, ...] = (*ARGUMENTS, *REFUSALS)
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            add(name, ResolvedName(entry))
            if entry.is_flag:
                add(f"no-{name}", ResolvedName(entry, reverse=True))
        for name in entry.opposites if isinstance(entry, Argument) else ():
            add(name, ResolvedName(entry, reverse=True))
            add(f"no-{name}", ResolvedName(entry))
    return index


_INDEX = _index()
_OBJECTS = {
    "speculative_config": split_config,
    "compilation_config": split_compilation_config,
    "additional_config": split_additional_config,
    "eplb_config": split_eplb_config,
}
_FAMILIES = {name[:-1]: found for name, found in _INDEX.items() if name.endswith("*")}
_IMPLEMENTED = [name for name, found in _INDEX.items() if isinstance(found.entry, Argument)]
_REFUSED = [name for name, found in _INDEX.items() if isinstance(found.entry, Refusal)]


def canonical(name: str) -> str:
    """A name in lower case, without leading dashes and with dashes instead of underscores."""
    return name.lstrip("-").replace("_", "-").lower()


def find(name: str) -> ResolvedName:
    """The meaning of a name in any spelling. Raises ArgumentError for an unknown name."""
    key = canonical(name)
    result = _INDEX.get(key) or next((member for prefix, member in _FAMILIES.items() if key.startswith(prefix)), None)
    if result is not None:
        return result
    stem, dot, member = key.partition(".")
    if dot and stem in _INDEX:
        entry = _INDEX[stem].entry
        if isinstance(entry, Refusal):
            raise ArgumentError(f"{entry.reason}; {entry.remedy}")
        if entry.field in _OBJECTS:
            return _INDEX[stem]
        whole = json.dumps({member.partition(".")[0].replace("-", "_"): "..."})
        raise ArgumentError(f"give one JSON object for all members: {name.partition('.')[0]} '{whole}'")
    longer = [known for known in _IMPLEMENTED if known.startswith(key)] if len(key) > 3 else []  # "--mem-frac"
    # Suggest a refused name only if it is very similar.
    near = (
        longer
        or get_close_matches(key, _IMPLEMENTED, n=1, cutoff=0.7)
        or get_close_matches(key, _REFUSED, n=1, cutoff=0.85)
    )
    hint = f"did you mean {_spelled_like(name, near[0])}?" if near else "troupe serve --help lists all arguments"
    raise ArgumentError(f"there is no such argument; {hint}")


def _spelled_like(given: str, name: str) -> str:
    dashes = given[: len(given) - len(given.lstrip("-"))]
    return dashes + name if dashes or "-" in given else name.replace("-", "_")


def resolve(layers: Iterable[Sequence[RawArgument]]) -> dict[str, Any]:
    """Parse the given values by field; a later layer overrides an earlier one.

    In one layer, two spellings of the same argument must agree; for one spelling given twice the last value counts.
    Raises ArgumentError with every problem found.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for layer in layers:
        seen: dict[str, RawArgument] = {}
        for given in _split(_with_nodes(layer, values, problems), problems):
            try:
                result, raw = _meant(given)
                argument = result.entry
                if isinstance(argument, Refusal):
                    argument.check(_reversed(raw) if result.reverse else raw)
                    continue
                value = argument.parse(raw)
                if result.reverse:
                    value = not value
            except ArgumentError as error:
                problems.extend(f"{given.spelling}: {problem}" for problem in error.problems)
                continue
            field = argument.field
            earlier = seen.get(field)
            if earlier is not None and earlier.spelling != given.spelling and values[field] != value:
                problems.append(f"{given.spelling}: contradicts {earlier.spelling}; give one of them")
                continue
            seen[field] = given
            values[field] = value
    if problems:
        raise ArgumentError(problems)
    return values


def _meant(given: RawArgument) -> tuple[ResolvedName, object]:
    """The name and its value; where the value of a refused name sets a flag, that flag. Raises ArgumentError."""
    result = find(given.name)
    meaning = result.entry.meaning(given.value) if isinstance(result.entry, Refusal) else None
    return (result, given.value) if meaning is None else (find(meaning), True)


def _with_nodes(
    layer: Sequence[RawArgument], earlier: Mapping[str, object], problems: list[str]
) -> Sequence[RawArgument]:
    """The layer with vLLM's arguments of several nodes replaced: see ``node_arguments``. ``earlier``: values of the
    layers before, by field."""
    values = {name: value for name in READ_NAMES if (value := earlier.get(name.replace("-", "_"))) is not None}
    spellings: dict[str, str] = {}
    others: list[RawArgument] = []
    balanced = False  # by another server
    for given in layer:
        found = _INDEX.get(canonical(given.name))
        name = found.entry.name if found else ""
        value = _reversed(given.value) if found and found.reverse else given.value
        if name in OTHER_BALANCERS and value is not None:
            balanced = balanced or name == "data-parallel-rank" or parse_flag(value) is not False
        if name in NODE_NAMES | READ_NAMES:
            values[name] = value
            spellings[name] = given.spelling
        if name not in NODE_NAMES:
            others.append(given)
    if len(others) == len(layer) or balanced:
        return others
    try:
        added = node_arguments(values)
    except ArgumentError as error:
        problems.extend(error.problems)
        return others
    return others + [
        RawArgument(name=name, value=value, spelling=spellings.get(stated, stated))
        for stated, (name, value) in added.items()
    ]


def _split(layer: Sequence[RawArgument], problems: list[str]) -> list[RawArgument]:
    """The layer with the members of ``--speculative-config`` and other objects as separate values.

    Members may also be given one by one, as ``--speculative-config.method mtp``.
    """
    entries: list[RawArgument] = []
    objects: dict[str, dict[str, object]] = {}
    spellings: dict[tuple[str, str], str] = {}  # of members, and with "" of the objects
    for given in layer:
        stem, dot, member = given.name.partition(".")
        field = _object_field(stem)
        if not dot or field is None:
            entries.append(given)
        if field is None or not isinstance(config := _member(member, given) if dot else _parsed(given), dict):
            continue
        objects.setdefault(field, {}).update(config)
        spellings[field, ""] = stem if dot else given.spelling
        for key in config:
            spellings[field, key] = given.spelling if dot else f"{given.spelling} {key}"
    for field, config in objects.items():
        try:
            for key, name, value in _OBJECTS[field](config):
                stem, dot, member = key.partition(".")
                spelling = spellings.get((field, key)) or f"{spellings[field, stem]}{dot}{member}"
                entries.append(RawArgument(name=name, value=value, spelling=spelling))
        except ArgumentError as error:
            problems.extend(f"{spellings[field, '']}: {problem}" for problem in error.problems)
    return entries


def _object_field(name: str) -> str | None:
    found = _INDEX.get(canonical(name))
    return found.entry.field if found and isinstance(found.entry, Argument) and found.entry.field in _OBJECTS else None


def _member(name: str, given: RawArgument) -> dict[str, object]:
    """The member of an object that is given alone; text is read as JSON where it is valid."""
    value = given.value
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads({"True": "true", "False": "false"}.get(value, value))
    return {name.replace("-", "_"): value}


def _parsed(argument: RawArgument) -> object:
    """The value of an argument, or None if it is invalid, which is reported elsewhere."""
    entry = find(argument.name).entry
    try:
        return entry.parse(argument.value) if isinstance(entry, Argument) else None
    except ArgumentError:
        return None


def _reversed(value: object) -> object:
    flag = parse_flag(value)
    return value if flag is None else not flag
