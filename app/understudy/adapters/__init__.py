"""The LoRA adapters of the included model: a pirate, a poet, and JSON only. Their trainer is in
tests/understudy/adapters.

Importing this package names files and imports neither torch nor transformers.
"""

from pathlib import Path

from app.understudy import MODEL_DIR

__all__ = ["ADAPTERS", "adapter_names", "included_adapter", "is_included_model"]

ADAPTERS: Path = Path(__file__).resolve().parent
"""The directory that holds a directory in PEFT's format for each adapter."""


def adapter_names() -> tuple[str, ...]:
    """The included adapters, sorted."""
    return tuple(sorted(path.parent.name for path in ADAPTERS.glob("*/adapter_config.json")))


def is_included_model(model_path: str | None) -> bool:
    """Whether a path is that of the included model."""
    return model_path is not None and Path(model_path).expanduser().resolve() == MODEL_DIR


def included_adapter(path: str) -> str | None:
    """The directory of the included adapter ``path``; None if there is none, or if ``path`` exists."""
    if path not in adapter_names() or Path(path).exists():
        return None
    return str(ADAPTERS / path)
