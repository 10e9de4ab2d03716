"""All arguments, in the order of the help text."""

from __future__ import annotations

from actors.options.argument import Argument
from actors.options.declaration import declared
from actors.options.speculative import SpeculativeArguments

__all__ = ["ARGUMENTS", "SPECULATIVE_ARGUMENTS"]

ARGUMENTS: tuple[Argument, ...] = declared(SpeculativeArguments)

SPECULATIVE_ARGUMENTS = tuple(each for each in ARGUMENTS if each.field in SpeculativeArguments.__annotations__)
"""The arguments of speculative decoding."""
