"""The help texts of the command line, from the table of options."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable

from actors.options import ARGUMENTS, Argument
from actors.options.refused import REFUSALS

__all__ = ["default_of", "overview", "serve_help"]


def overview() -> str:
    """What ``troupe --help`` prints."""
    return """\
Troupe serves language models over HTTP.

Usage:
  troupe serve                     serve the small included model on 127.0.0.1:8000
  troupe serve MODEL [arguments]   serve a Hugging Face directory or repository, or a GGUF file
  troupe serve --help              all arguments
  troupe serve --help-all          and those of other engines that are refused, with the reason
  troupe chat                      a conversation in the terminal with a server (--url, default: this machine's)
  troupe batch run IN OUT          answer the requests of a JSONL file, by an engine of its own or a server (--url)
  troupe dashboards FOLDER         put Grafana boards, Prometheus rules and a compose file into FOLDER
  troupe --version
"""


def serve_help(*, refused: bool = False, width: int | None = None) -> str:
    """What ``troupe serve --help`` prints: every argument by group, at most ``width`` columns (the terminal's)."""
    columns = min(width or shutil.get_terminal_size().columns, 120)
    intro = (
        "Serves MODEL (without one, the small included model). Arguments may also come from the environment variable "
        "TROUPE_ARGS and from a YAML file (--config); the command line wins over the variable, and that over the file. "
        "Dashes in names may be underscores; a flag has a --no- form. Ends with status 0 after an orderly stop, 2 for "
        "what no restart heals (arguments, the model, the device), 3 when the engine failed otherwise."
    )
    lines = ["Usage: troupe serve [MODEL] [arguments]", "", *textwrap.wrap(intro, columns)]
    for group in dict.fromkeys(argument.group for argument in ARGUMENTS):
        lines += ["", f"{group}:"]
        for argument in ARGUMENTS:
            if argument.group == group:
                lines += _argument(argument, columns)
    if refused:
        lines += ["", "Refused, known from other engines (a value that changes nothing is accepted):"]
        lines += _refusals(columns)
    return "\n".join(lines) + "\n"


def _argument(argument: Argument, columns: int) -> list[str]:
    head = f"  --{argument.name}"
    if not argument.is_flag:
        head += f" {argument.metavar or '|'.join(argument.choices) or argument.kind.upper()}"
    others = [f"--{name}" if len(name) > 1 else f"-{name}" for name in argument.aliases]
    if opposites := argument.opposites or ((f"no-{argument.name}",) if argument.default is True else ()):
        others.append(f"reverse: {', '.join(f'--{name}' for name in opposites)}")
    if others:
        head += f"  (also {', '.join(others)})"
    text = argument.help
    if argument.kind in ("int", "float"):
        text += f" {argument.bounds[0].upper()}{argument.bounds[1:]}."
    return [head, *_indented(f"{text} Default: {default_of(argument)}.", columns)]


def default_of(argument: Argument) -> str:
    """The default as a reader sees it."""
    match argument.default:
        case None:
            return argument.default_text
        case bool(flag):
            return "on" if flag else "off"
        case "" | {} | ():
            return "none"
        case tuple(names):
            return ",".join(names)
        case value:
            return str(value)


def _refusals(columns: int) -> Iterable[str]:
    for group in dict.fromkeys(refusal.group for refusal in REFUSALS):
        yield f"  {group}:"
        members = [refusal for refusal in REFUSALS if refusal.group == group]
        for reason, remedy in dict.fromkeys((member.reason, member.remedy) for member in members):
            names = [
                f"--{name}" if len(name) > 2 else f"-{name}"
                for member in members
                if (member.reason, member.remedy) == (reason, remedy)
                for name in (member.name, *member.aliases)
            ]
            yield from textwrap.wrap(
                ", ".join(names), columns, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False
            )
            yield from _indented(f"{reason[0].upper()}{reason[1:]}; {remedy}.", columns)


def _indented(text: str, columns: int) -> list[str]:
    indent = " " * 6
    return textwrap.wrap(text, columns, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
