"""A platform that cannot be loaded is refused with what to do."""

import sys
from importlib.machinery import ModuleSpec

import pytest

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.devices.select import select_device


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
    module = f"kernels.devices.{device}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(module, error), *sys.meta_path])
    with pytest.raises(UnsupportedError, match=rf"{error}.*--device cpu"):
        select_device(RunnerConfig(model_path="", device=device))


def test_an_unknown_device_is_refused():
    with pytest.raises(UnsupportedError, match="cpu, npu or cuda"):
        select_device(RunnerConfig(model_path="", device="abacus"))
