"""PyTorch without the parts that serving on a CPU does not use: two fifths of the time its import takes, and 26 MB.

``import torch`` runs its exporter, data loaders, quantization workflow and the shape functions of its compiler, which
in turn bring decompositions and references of most operators. Here such modules are found and named as always, but run
only when something is asked of one of them or a part of the compiler is imported; then all do, in their usual order, on
which some depend. What can be missed without that are the shape functions, which nobody asks for: they serve tensors
without memory (device "meta") of operators that have none in C++. So this is for workers on CPUs only.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["import_torch"]

_SPARED = frozenset(
    f"torch.{name}"
    for name in (
        "_meta_registrations",
        "ao",
        "distributed._meta_registrations",
        "distributions",
        "export",
        "masked",
        "nn.intrinsic",
        "nn.qat",
        "nn.quantizable",
        "nn.quantized",
        "onnx",
        "optim",
        "quantization",
        "testing",
        "utils.data",
    )
)

_COMPILER = frozenset(f"torch.{name}" for name in ("_decomp", "_dynamo", "_inductor", "_prims", "_refs"))


def import_torch() -> None:
    """Import torch sparingly, where it is not imported already."""
    if "torch" in sys.modules:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401 - for everybody who imports it after this
    finally:
        finder.over = True


class _Spared(ModuleType):
    """A module that runs when an attribute is asked for that its spec does not give."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__dict__["__spec__"]
        if spec is None or not spec.loader.finder.run(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self, name)


class _Loader(Loader):
    def __init__(self, finder: _Finder, loader: Loader) -> None:
        self.finder = finder
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Spared(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not now: its attributes are complete as far as its spec gives them."""
        self.finder.spared[module.__name__] = module


class _Finder(MetaPathFinder):
    """``spared``: modules that have not run, in the order of their import; ``over``: whether torch's import is."""

    def __init__(self) -> None:
        self.spared: dict[str, ModuleType] = {}
        self.over = False
        self._lock = threading.RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.over and fullname in _COMPILER:
            self.run_all()
        if self.over or fullname not in _SPARED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self, spec.loader)
        return spec

    def run(self, asked: ModuleType) -> bool:
        """Let it run. False where it is not complete yet, and while it runs and asks itself for what it has not."""
        with self._lock:
            if asked.__name__ not in self.spared:
                return not isinstance(asked, _Spared)  # another thread may have run it meanwhile
            if self.over:
                self.run_all()
            else:
                self._run(asked.__name__)
            return not isinstance(asked, _Spared)

    def run_all(self) -> None:
        with self._lock:
            while self.spared:
                self._run(next(iter(self.spared)))

    def _run(self, name: str) -> None:
        module = self.spared.pop(name)
        loader: Any = module.__spec__.loader if module.__spec__ is not None else None
        loader.loader.exec_module(module)
        module.__class__ = ModuleType
