"""Argument: names, type, bounds and help of one argument, and the parsing and validation of its values."""

from __future__ import annotations

import json
import math
import os
import re
from fractions import Fraction
from typing import Literal, TypeAlias

import msgspec

from actors.options.errors import ArgumentError

__all__ = ["MAX_TEXT", "Argument", "Group", "Kind", "Number", "parse_flag"]

Kind: TypeAlias = Literal["str", "int", "float", "flag", "json", "names", "ints", "floats", "words"]
Number: TypeAlias = int | float

Group: TypeAlias = Literal[
    "Model and tokenizer",
    "HTTP server",
    "API",
    "Memory and scheduling",
    "Tokenizer batching",
    "Runtime",
    "Devices and kernels",
    "LoRA",
    "Quantization",
    "Grammar",
    "Speculative decoding",
    "Metrics",
    "Logging",
    "Tracing",
    "Configuration file",
]

MAX_TEXT = 65536
"""The longest text value in characters, JSON included: far above any real value, far below a harmful size."""

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = frozenset({"none", "null"})
_SUFFIXED = re.compile(r"(\d{1,15}(?:\.\d{1,9})?)([kmg])|(\d{1,15})([KMG])")
_POWERS = {"k": 1, "m": 2, "g": 3}


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """One argument, built from its declaration.

    Names are stored without leading dashes (``max-running-requests``). The command line takes them after two dashes; a
    dash may always be an underscore. A flag has a ``--no-`` form for each of its names.
    """

    name: str
    aliases: tuple[str, ...] = ()
    opposites: tuple[str, ...] = ()  # flags only: names that set the flag to false
    kind: Kind
    default: object
    group: Group
    help: str  # the effect, with the unit
    default_text: str = ""  # meaning of the default None
    metavar: str = ""
    choices: tuple[str, ...] = ()  # str and names only
    synonyms: dict[str, str] = {}  # alternative spelling -> choice
    unbuilt_choices: dict[str, str] = {}  # choice of other engines, or * for any -> reason of its refusal and remedy
    minimum: Number | None = None
    maximum: Number | None = None
    above: bool = False  # the minimum itself is too small
    also: tuple[Number, ...] = ()  # values outside the bounds with a special meaning
    secret: bool = False
    server_only: bool = False  # read by the server alone: Engine(...) refuses it

    @property
    def field(self) -> str:
        """The argument's field in Arguments and keyword in the embedding API."""
        return self.name.replace("-", "_")

    @property
    def optional(self) -> bool:
        """Whether None is a valid value: the default that ``default_text`` explains."""
        return self.default is None

    @property
    def is_flag(self) -> bool:
        return self.kind == "flag"

    @property
    def takes_many(self) -> bool:
        """Whether the command line takes several words: ``--cuda-graph-bs 1 2 4``."""
        return self.kind in ("ints", "floats", "words")

    def parse(self, given: object) -> object:
        """Convert a value (text of a command line, a YAML or Python value) to the field's type and check it.

        None means that it was left out. Raises ArgumentError with a sentence that continues the argument's name: "must
        be an integer, not 'x'".
        """
        if given is None:
            return dict(self.default) if isinstance(self.default, dict) else self.default
        if self.optional and isinstance(given, str):
            word = given.strip().lower()
            if word in _NONE or (word == "auto" and self.kind in ("int", "float")):
                return None
        value = self._converted(given)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        """Raise ArgumentError unless the value, already of the field's type, is within the argument's bounds."""
        if value is None and self.optional:
            return
        match self.kind:
            case "flag":
                ok = isinstance(value, bool)
            case "int":
                ok = isinstance(value, int) and not isinstance(value, bool)
            case "float":
                ok = isinstance(value, int | float) and not isinstance(value, bool)
            case "str":
                ok = isinstance(value, str)
            case "names" | "words":
                ok = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
            case "ints":
                ok = isinstance(value, tuple) and all(type(number) is int for number in value)
            case "floats":
                ok = isinstance(value, tuple) and all(type(number) is float for number in value)
            case "json":
                ok = isinstance(value, dict)
        if not ok:
            raise self._wrong_type(value)
        if isinstance(value, int | float) and self.kind != "flag":
            self._check_number(value)
        elif isinstance(value, str):
            self._check_text(value)
        elif isinstance(value, tuple):
            for member in value:
                if self.kind in ("ints", "floats"):
                    self._check_number(member)
                else:
                    self._check_text(member)

    def _converted(self, value: object) -> object:
        text = value.strip() if isinstance(value, str) else None
        match self.kind:
            case "flag":
                flag = parse_flag(value)
                if flag is None:
                    raise self._wrong_type(value)
                return flag
            case "int":
                if text is not None:
                    try:
                        return _integer(text)
                    except ValueError:
                        raise self._wrong_type(value) from None
                if isinstance(value, float) and value.is_integer():
                    return int(value)
                return value
            case "float":
                if text is not None:
                    try:
                        return float(text)
                    except ValueError:
                        raise self._wrong_type(value) from None
                if isinstance(value, int) and not isinstance(value, bool):
                    return float(value) if abs(value) < 1 << 64 else math.inf  # infinity is out of all bounds
                return value
            case "str":
                if isinstance(value, int | float) and not isinstance(value, bool):
                    return str(value)  # YAML reads an unquoted 7 as a number
                if isinstance(value, os.PathLike):
                    value = os.fspath(value)
                return self._canonical(value) if isinstance(value, str) else value
            case "names":
                parts = text.split(",") if text is not None else value
                if not isinstance(parts, list | tuple):
                    raise self._wrong_type(value)
                return tuple(
                    self._canonical(part.strip()) if isinstance(part, str) else part for part in parts if part != ""
                )
            case "ints":
                parts = text.strip("[]").replace(",", " ").split() if text is not None else value
                if not isinstance(parts, list | tuple):
                    raise self._wrong_type(value)
                try:
                    return tuple(int(part) if isinstance(part, str) else part for part in parts)
                except ValueError:
                    raise self._wrong_type(value) from None
            case "floats":
                parts = text.strip("[]").replace(",", " ").split() if text is not None else value
                if not isinstance(parts, list | tuple):
                    raise self._wrong_type(value)
                try:
                    return tuple(float(part) for part in parts)
                except (TypeError, ValueError, OverflowError):
                    raise self._wrong_type(value) from None
            case "words":
                try:
                    parts = value if text is None else json.loads(text) if text.startswith("[") else _words(text)
                except (ValueError, RecursionError):
                    raise self._wrong_type(value) from None
                if not isinstance(parts, list | tuple):
                    raise self._wrong_type(value)
                return tuple(_word(part) for part in parts)
            case "json":
                return self._json(text) if text is not None else value

    def _canonical(self, text: str) -> str:
        if not self.choices:
            return text
        lowered = text.strip().lower()
        known = lowered in self.choices or lowered in self.unbuilt_choices
        return self.synonyms.get(lowered, lowered if known else text)

    def _json(self, text: str) -> object:
        if len(text) > MAX_TEXT:
            raise ArgumentError(f"may have at most {MAX_TEXT} characters, not {len(text)}")
        try:
            return json.loads(text) if text else {}
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"must be a JSON object: {error}") from None

    def _check_number(self, value: Number) -> None:
        if value in self.also:
            return
        low = self.minimum is not None and (value <= self.minimum if self.above else value < self.minimum)
        high = self.maximum is not None and value > self.maximum
        if low or high or not math.isfinite(value):
            raise ArgumentError(f"must be {self.bounds}, not {value}")

    def _check_text(self, value: str) -> None:
        if len(value) > MAX_TEXT or "\0" in value:
            raise ArgumentError(f"must be text of at most {MAX_TEXT} characters without NUL")
        if value in self.choices:
            return
        reason = self.unbuilt_choices.get(value) or self.unbuilt_choices.get("*")
        if reason:
            raise ArgumentError(f"{value[:64]}: {reason}")
        if self.choices:
            raise ArgumentError(f"must be {self.bounds}, not {value!r}")
        if not self.choices and not value.strip() and self.default != "":
            raise ArgumentError("must not be empty; leave it out for the default")

    def _wrong_type(self, value: object) -> ArgumentError:
        shown = "***" if self.secret else repr(value)
        return ArgumentError(f"must be {self.bounds}, not {shown[:200]}")

    @property
    def bounds(self) -> str:
        """The valid values in words: "an integer from 1 to 65535"."""
        match self.kind:
            case "flag":
                return "true or false"
            case "str" | "names":
                listed = " or ".join((", ".join(self.choices[:-1]), self.choices[-1])) if len(self.choices) > 1 else ""
                listed = listed or "".join(self.choices)
                if self.kind == "names":
                    return f"a comma-separated list of {listed or 'names'}"
                return listed or "text"
            case "words":
                return "words, separated by spaces or commas"
            case "floats":
                joint, until = ("above", "up to") if self.above else ("from", "to")
                return f"numbers {joint} {self.minimum} {until} {self.maximum}"
            case "ints":
                return f"integers from {self.minimum} to {self.maximum}"
            case "json":
                return "a JSON object"
            case "int" | "float":
                noun = "an integer" if self.kind == "int" else "a number"
                if self.minimum is not None and self.maximum is not None:
                    joint = "above" if self.above else "from"
                    until = "up to" if self.above else "to"
                    noun += f" {joint} {self.minimum} {until} {self.maximum}"
                return " or ".join((noun, *map(str, self.also)))


def _integer(text: str) -> int:
    """The number in ``text``: 32768, or with a suffix as in vLLM's command lines: 32k is 32,000, 32K is 32,768. Raises
    ValueError."""
    found = _SUFFIXED.fullmatch(text)
    if found is None:
        return int(text)
    decimal, thousands, binary, kibis = found.groups()
    if binary:
        return int(binary) << 10 * _POWERS[kibis.lower()]
    number = Fraction(decimal) * 1000 ** _POWERS[thousands]
    if number.denominator != 1:
        raise ValueError(text)
    return int(number)


def _words(text: str) -> list[object]:
    """Words between spaces and commas, and JSON objects, as in command lines of vLLM and SGLang. Raises ValueError."""
    result: list[object] = []
    while text := text.lstrip(" ,\t\n"):
        if text.startswith("{"):
            part, end = json.JSONDecoder().raw_decode(text)
            result.append(part)
        else:
            end = len(re.split(r"[\s,]", text, maxsplit=1)[0])
            result.append(text[:end])
        text = text[end:]
    return result


def _word(part: object) -> object:
    if isinstance(part, dict):
        return json.dumps(part)
    return str(part) if type(part) in (int, float) else part


def parse_flag(value: object) -> bool | None:
    """Parse true, false and their usual spellings; None for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        lowered = value.strip().lower()
        return True if lowered in _TRUE else False if lowered in _FALSE else None
    return bool(value) if isinstance(value, int) and value in (0, 1) else None
