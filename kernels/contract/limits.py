"""Limits of the sizes in a model's files, checked before anything is allocated."""

from __future__ import annotations

__all__ = ["MAX_EXPERTS", "MAX_EXPERTS_OF_MODEL", "MAX_LAYERS", "MAX_SIZE"]

MAX_EXPERTS = 4096
"""Experts of one layer."""
MAX_EXPERTS_OF_MODEL = 1 << 20
"""Experts of all layers together."""
MAX_LAYERS = 4096
MAX_SIZE = 1 << 31
"""Any other size in config.json."""
