"""The version of Troupe."""

from __future__ import annotations

import importlib.metadata

__all__ = ["troupe_version"]


def troupe_version() -> str:
    """The version of the installed distribution; "unknown" if the sources run without an installation."""
    try:
        return importlib.metadata.version("troupe-llm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
