"""The arguments of engine and server: one declarative table, and the parsed values."""

from actors.options.argument import Argument
from actors.options.errors import ArgumentError
from actors.options.table import ARGUMENTS
from actors.options.values import Arguments

__all__ = ["ARGUMENTS", "Argument", "ArgumentError", "Arguments"]
