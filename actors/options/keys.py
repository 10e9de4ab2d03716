"""API keys from files and from the environment, where process listings do not show them."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.options.argument import MAX_TEXT
from actors.options.errors import ArgumentError

__all__ = ["KEY_VARIABLES", "with_keys"]

_log = logging.getLogger("troupe.arguments")

KEY_VARIABLES = {"api_key": "TROUPE_API_KEY", "admin_api_key": "TROUPE_ADMIN_API_KEY"}
"""By argument, the environment variable with its default keys."""


def with_keys(
    values: Mapping[str, Any], environ: Mapping[str, str], spell: Callable[[str], str] = str
) -> dict[str, Any]:
    """The values, with ``api_key`` and ``admin_api_key`` read from their files or else from ``environ``.

    ``spell``: how errors write the name of an argument.

    Raises ArgumentError for a file that cannot be read or has no key, and for a key given in two ways.
    """
    result = dict(values)
    problems: list[str] = []
    for field, variable in KEY_VARIABLES.items():
        path = result.get(f"{field}_file")
        try:
            if path is not None:
                if result.get(field) is not None:
                    raise ArgumentError(f"{spell(field)} and {spell(field + '_file')} are both given; leave one out")
                result[field] = ",".join(_read(spell(f"{field}_file"), str(path)))
            elif result.get(field) is None and variable in environ:
                result[field] = ",".join(_split(variable, environ[variable]))
            else:
                continue
            if field == "admin_api_key" and "," in result[field]:
                raise ArgumentError(f"{spell(field)}: there can be only one; leave the others out")
        except ArgumentError as error:
            problems.extend(error.problems)
    if problems:
        raise ArgumentError(problems)
    return result


def _read(name: str, path: str) -> list[str]:
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(MAX_TEXT + 1)
    except OSError as error:
        raise ArgumentError(f"{name}: {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_TEXT:
        raise ArgumentError(f"{name}: {path} is larger than {MAX_TEXT} bytes; write one key a line")
    try:
        keys = _split(f"{name}: {path}", content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ArgumentError(f"{name}: {path} is not UTF-8 text; write one key a line") from None
    if stat.S_ISREG(mode) and mode & (stat.S_IROTH | stat.S_IWOTH):
        _log.warning("%s: every user of this machine may read %s; chmod 600 it", name, path)
    return keys


def _split(source: str, text: str) -> list[str]:
    """Split keys at newlines and commas."""
    keys = [key.strip() for line in text.splitlines() for key in line.split(",") if key.strip()]
    if not keys:
        raise ArgumentError(
            f"{source} contains no key, so the server would be open to all; leave it out if that is intended"
        )
    if not all(key.isprintable() for key in keys):
        raise ArgumentError(f"{source} contains a key with a control character, which no header can contain")
    return keys
