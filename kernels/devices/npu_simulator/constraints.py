"""Rules of the device's operators that PyTorch does not have; a violation raises with operator, argument and rule.

The source of each rule is named where it is checked: "facts" is the project's sheet of facts about torch_npu 2.13 from
two engines and the vendor's documentation (section in brackets), "vendor" the operator documentation in the wheel. A
real device may react to a violation with an error, with another code, or silently with wrong results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ConstraintError", "contiguous", "dtypes", "require", "same_dtype"]


class ConstraintError(RuntimeError):
    """A call that the device would reject or compute wrongly."""

    def __init__(self, operator: str, argument: str, rule: str) -> None:
        super().__init__(f"{operator}: {argument}: {rule}")
        self.operator, self.argument, self.rule = operator, argument, rule


def require(holds: Any, operator: str, argument: str, rule: str) -> None:
    """Raise ConstraintError unless ``holds``."""
    if not holds:
        raise ConstraintError(operator, argument, rule)


def contiguous(operator: str, **tensors: Tensor | None) -> None:
    """Every tensor must be contiguous."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            rule = f"must be contiguous, has shape {tuple(tensor.shape)} and strides {tensor.stride()}"
            raise ConstraintError(operator, name, rule)


def dtypes(operator: str, allowed: tuple[torch.dtype, ...], **tensors: Tensor | None) -> None:
    """Every tensor must have one of these dtypes."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in allowed:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ConstraintError(operator, name, f"must be {names}, is {str(tensor.dtype).removeprefix('torch.')}")


def same_dtype(operator: str, **tensors: Tensor | None) -> None:
    """All tensors must share their dtype."""
    result = {name: tensor.dtype for name, tensor in tensors.items() if tensor is not None}
    if len(set(result.values())) > 1:
        listed = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in result.items())
        raise ConstraintError(operator, next(iter(result)), f"dtypes must be equal: {listed}")
