"""Arguments: the values of all arguments of the engine and the server."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from actors.options.argument import Argument
from actors.options.consistency import contradictions
from actors.options.errors import ArgumentError
from actors.options.keys import with_keys
from actors.options.lora import AdapterPath, adapter_path
from actors.options.resolving import RawArgument, find, resolve
from actors.options.speculative import SpeculativeArguments
from actors.options.table import ARGUMENTS

__all__ = ["Arguments"]

_INSTEAD = {
    "log_level": "use logging.getLogger('troupe').setLevel(...)",
    "shutdown_timeout": "use engine.drain(timeout)",
}
"""What an embedding program does in place of options of the server."""


class Arguments(SpeculativeArguments, frozen=True, kw_only=True):
    """The values of all arguments. Field names are the long names with underscores.

    The fields are declared in one file a group: ``model``, ``serving`` ... ``speculative``. Each group extends the
    previous one, because a msgspec struct has a single base.

    The constructor raises ArgumentError for a value that is out of bounds or contradicts another. Use
    :meth:`from_keywords` for values and names as users write them.
    """

    def __post_init__(self) -> None:
        problems = []
        for argument in ARGUMENTS:
            try:
                argument.check(getattr(self, argument.field))
            except ArgumentError as error:
                problems.append(f"{argument.field}: {error}")
        if problems or (problems := contradictions(self)):
            raise ArgumentError(problems)

    @classmethod
    def from_keywords(cls, **keywords: object) -> Self:
        """Build Arguments from Python values by any of their names, as in ``Engine(model=..., max_num_seqs=64)``.

        Raises ArgumentError for an unknown name (with the most similar one), a feature that is not built, a value out
        of bounds, and two names of one argument with different values.
        """
        layer = [RawArgument(name=name, value=value, spelling=name) for name, value in keywords.items()]
        if keywords.get("config") is not None:
            raise ArgumentError("config: a file is read by the command line only; give its arguments as keywords")
        return cls(**with_keys(resolve([layer]), {}))

    @classmethod
    def for_engine(cls, **keywords: object) -> Self:
        """As :meth:`from_keywords`, for an engine without a server. Raises ArgumentError for options of the server,
        too."""
        arguments = cls.from_keywords(**keywords)
        problems = []
        for name, value in keywords.items():
            entry = find(name).entry
            if value is not None and isinstance(entry, Argument) and entry.server_only:
                instead = _INSTEAD.get(entry.field, "use troupe serve")
                problems.append(f"{name}: a server has it and Engine(...) starts none; leave it out, or {instead}")
        if problems:
            raise ArgumentError(problems)
        return arguments

    @property
    def model_name(self) -> str:
        """The model's first name in the API; empty without a name and a model."""
        return self.model_names[0] if self.model_names else ""

    @property
    def model_names(self) -> tuple[str, ...]:
        """The model's names in the API, each once; those of a GGUF file come from the file."""
        if self.served_model_name:
            return tuple(dict.fromkeys(self.served_model_name))
        return (self.model_path,) if self.model_path else ()

    @property
    def has_adapters(self) -> bool:
        """Whether the server takes LoRA adapters."""
        return self.enable_lora or self.lora_paths is not None

    @property
    def adapter_paths(self) -> tuple[AdapterPath, ...]:
        """The entries of ``lora_paths``."""
        return tuple(adapter_path(word) for word in self.lora_paths or ())

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The keys of clients, each once."""
        keys = (key.strip() for key in (self.api_key or "").split(","))
        return tuple(dict.fromkeys(key for key in keys if key))

    @property
    def stall_seconds(self) -> float:
        """``soft_watchdog_timeout``, or its default from the other watchdog's."""
        value = self.soft_watchdog_timeout
        return min(60.0, self.watchdog_timeout / 5) if value is None else value

    def describe(self) -> dict[str, Any]:
        """Every value by field name, as JSON types, with hidden API keys: for ``/server_info`` and logs."""
        values: dict[str, Any] = msgspec.to_builtins(self)
        for argument in ARGUMENTS:
            if argument.secret and values[argument.field] is not None:
                values[argument.field] = "***"
        return values

    def __repr__(self) -> str:
        changed = {
            argument.field: "***" if argument.secret else getattr(self, argument.field)
            for argument in ARGUMENTS
            if getattr(self, argument.field) != argument.default
        }
        return f"Arguments({', '.join(f'{field}={value!r}' for field, value in changed.items())})"
