"""The source files that security tests read, and the modules that none of them may import."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "MODULES",
    "PACKAGES",
    "ROOT",
    "modules",
]

ROOT = Path(__file__).parents[2]

PACKAGES = ("app", "actors", "kernels", "telemetry")

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle", "codeop"}


def modules() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
