"""The actor runtime and the engine's actors."""

from importlib.util import find_spec
from pathlib import Path

__all__: list[str] = []


def _check_kernels() -> None:
    """Hugging Face's package kernels installs a module of the same name as ours, over ours or before it."""
    result = find_spec("kernels")
    origin = None if result is None else result.origin
    if origin is None or b"Troupe" not in Path(origin).read_bytes():
        raise ImportError(
            f"the module named kernels, {origin or 'whose __init__.py is gone'}, is not Troupe's. The package kernels "
            "(by Hugging Face) has the same name: remove it (pip uninstall kernels), then install Troupe again (pip "
            "install --force-reinstall --no-deps troupe-llm), or install each in an environment of its own.",
            name="kernels",
        )


_check_kernels()
