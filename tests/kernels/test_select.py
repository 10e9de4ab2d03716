"""A platform that cannot be loaded is refused with what to do."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from kernels.platforms.base import PlatformError
from kernels.platforms.select import select_platform
from kernels.step import RunnerConfig


class Broken:
    """Finds one module, whose import fails."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == self.name else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        raise self.error


@pytest.mark.parametrize("device", ["npu", "cuda"])
@pytest.mark.parametrize("error", [ImportError("no such file"), RuntimeError("two accelerators at the same time")])
def test_a_platform_that_cannot_be_imported_is_refused_with_a_remedy(monkeypatch, device, error):
    module = f"kernels.platforms.{device}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(module, error), *sys.meta_path])
    with pytest.raises(PlatformError, match=rf"{error}.*--device cpu"):
        select_platform(RunnerConfig(model_path="", device=device))


def test_an_unknown_device_is_refused():
    with pytest.raises(PlatformError, match="cpu, npu or cuda"):
        select_platform(RunnerConfig(model_path="", device="abacus"))
