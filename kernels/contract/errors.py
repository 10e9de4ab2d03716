"""Errors of loading a model. Each message says what to do."""

from __future__ import annotations

__all__ = ["CacheSizeError", "ConfigError", "GgufError", "LoadError", "UnsupportedError"]


class ConfigError(ValueError):
    """config.json, or what was merged over it, does not describe a model that this engine can run."""


class GgufError(ConfigError):
    """A GGUF file cannot be read as a model."""


class LoadError(RuntimeError):
    """The weights cannot be loaded."""


class CacheSizeError(ValueError):
    """The memory that was asked for does not hold a cache."""


class UnsupportedError(ValueError):
    """The device does not support what was asked of it."""
