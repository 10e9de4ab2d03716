"""PyTorch imported without what serving on a CPU does not use."""

import subprocess
import sys

import pytest

_PROGRAM = """
import sys
from kernels.sparing import import_torch
import_torch()
import kernels.runner, torch
spared = [name for name in ("torch._decomp", "torch._refs", "torch.optim.adam", "torch.utils.data.dataloader")
          if name in sys.modules]
assert not spared, spared
assert torch.utils.data.__file__.endswith("__init__.py")
try:
    torch.utils.data.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("it has an attribute that it cannot have")
assert len(torch.utils.data.TensorDataset(torch.arange(3))) == 3
assert type(torch.utils.data).__name__ == "module"
from torch.distributions import Normal
assert Normal(0.0, 1.0).mean == 0
print("whole")
"""

_COMPILING = """
from kernels.sparing import import_torch
import_torch()
import sys, torch
import torch._dynamo
assert torch.utils.data.TensorDataset
print("whole")
"""


@pytest.mark.parametrize("program", [_PROGRAM, _COMPILING], ids=["asked", "compiling"])
def test_it_is_whole_for_whoever_asks(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "whole\n", done.stderr
