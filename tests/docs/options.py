"""The list of all options as Markdown, from the table of options."""

from __future__ import annotations

from actors.options import ARGUMENTS, Argument
from app.cli.help import default_of

__all__ = ["options"]


def options() -> str:
    """A section for each group: name, default, effect and bounds of each option."""
    parts = []
    for group in dict.fromkeys(argument.group for argument in ARGUMENTS):
        parts += [f"## {group}", "", "| option | default | effect |", "|---|---|---|"]
        parts += [_row(argument) for argument in ARGUMENTS if argument.group == group]
        parts.append("")
    return "\n".join(parts)


def _row(argument: Argument) -> str:
    spelled = _spelled(argument.name, *argument.aliases)
    if opposites := argument.opposites or ((f"no-{argument.name}",) if argument.default is True else ()):
        spelled += f"; reverse: {_spelled(*opposites)}"
    effect = argument.help
    if argument.choices:
        effect += f" Choices: {', '.join(f'`{choice}`' for choice in argument.choices)}."
    elif argument.kind in ("int", "float"):
        effect += f" {argument.bounds[0].upper()}{argument.bounds[1:]}."
    mark = " *Server only.*" if argument.server_only else ""
    return f"| {spelled} | {_cell(default_of(argument))} | {_cell(effect)}{mark} |"


def _spelled(*names: str) -> str:
    return ", ".join(f"`--{name}`" if len(name) > 1 else f"`-{name}`" for name in names)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("\n", " ")
