"""The arguments of engine and server: one declarative table, and the values behind every way to give them."""

from actors.arguments.argument import Argument
from actors.arguments.errors import ArgumentError
from actors.arguments.table import ARGUMENTS
from actors.arguments.values import Arguments

__all__ = ["ARGUMENTS", "Argument", "ArgumentError", "Arguments"]
