"""Where compiled native libraries are kept, and whether one may be loaded from there.

A loaded library has all rights of its user. So one is loaded only if no user but root could have put it there: each
folder from ``troupe`` down to the file is owned by this user or by root, and no other user may write to it.
"""

from __future__ import annotations

import logging
import os
import stat
from functools import cache
from pathlib import Path

__all__ = ["UntrustedCache", "check_trusted", "is_trusted", "make_private", "native_cache"]

_log = logging.getLogger("troupe.kernels")


class UntrustedCache(OSError):
    """Another user may write to the cache; the message names the path, the reason and the remedy."""


def native_cache(name: str) -> Path:
    """The folder of one kind of library in the user's cache. Raises RuntimeError for a user without a home."""
    return _root() / name


def make_private(folder: Path) -> None:
    """Make ``folder`` and its parents; from ``troupe`` down only this user may enter them. Raises OSError."""
    places = _places(folder)
    places[0].parent.mkdir(parents=True, exist_ok=True)
    for place in places:
        place.mkdir(mode=0o700, exist_ok=True)


def check_trusted(path: Path) -> None:
    """Raise UntrustedCache where another user may replace ``path``, and OSError where it is not there."""
    places = _places(path)
    # A group may write to the folder around them, for many systems give each user a group of their own.
    outer = places[0].parent.stat().st_mode
    if outer & stat.S_IWOTH and not outer & stat.S_ISVTX:
        raise UntrustedCache(_refusal(places[0].parent, "every user may write to it", "take that right away"))
    for place in places:
        for found in (place.lstat(), place.stat()):
            if found.st_uid not in (0, os.geteuid()):
                raise UntrustedCache(_refusal(place, f"it belongs to user {found.st_uid}", "delete it"))
            if not stat.S_ISLNK(found.st_mode) and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                mode = stat.S_IMODE(found.st_mode)
                raise UntrustedCache(_refusal(place, f"other users may write to it (mode {mode:04o})", "delete it"))


def is_trusted(path: Path) -> bool:
    """Whether ``path`` is there and may be loaded; logs once why it may not."""
    try:
        check_trusted(path)
    except UntrustedCache as error:
        _warn(str(error))
        return False
    except OSError:
        return False
    return True


def _places(path: Path) -> list[Path]:
    """The folders from ``troupe`` down to ``path``, and ``path``."""
    return [place for place in (*reversed(path.parents), path) if place.is_relative_to(_root())]


def _root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "troupe"


def _refusal(place: Path, reason: str, remedy: str) -> str:
    return f"compiled libraries in {place} are not used: {reason}; {remedy}, or set XDG_CACHE_HOME to another folder"


@cache
def _warn(message: str) -> None:
    _log.warning("%s", message)
