"""Checks every call of a fused operator against the vendor: its rules first, then shapes and dtypes of the results.

The schema was compared when the operator was replaced (takeover.py). The vendor's meta function is the kernel that the
wheel registers for the meta device; for an overload without one, that of the overload it is ``like``. Without either
(for example for a workspace size), shapes are those of the reference only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_npu.npu.graphs import _NPU_GRAPH_OP_HANDLERS

from kernels.devices.npu_simulator.aten import overload_of
from kernels.devices.npu_simulator.dispatch import META, Engine, Operator, flat
from kernels.devices.npu_simulator.operators.reference import Reference

__all__ = ["CheckedOperator", "MetaMismatch", "SchemaMismatch"]


class SchemaMismatch(RuntimeError):
    """A reference and the installed wheel's schema differ."""


class MetaMismatch(RuntimeError):
    """A reference returned another shape or dtype than the vendor's meta function."""


def to_meta(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
    if isinstance(value, (list, tuple)):
        return type(value)(to_meta(item) for item in value)
    return value


class CheckedOperator(Operator):
    """A reference with its rules and the vendor's meta function."""

    def __init__(self, engine: Engine, overload: Any, entry: Reference) -> None:
        self.reference, self.rules = entry.compute, entry.rules
        self.meta, self.shape_of = meta_function(overload, entry), entry.shape
        self.writes = any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in overload._schema.arguments
        )
        self.given_outputs = any(argument.name == "out" for argument in overload._schema.arguments)
        super().__init__(engine, overload, self.run, self.shapes, host=entry.host)
        self.updatable = overload.__name__ in _NPU_GRAPH_OP_HANDLERS

    @property
    def checked_by_vendor(self) -> bool:
        """Whether the vendor has a meta function for this operator."""
        return self.meta is not None

    def shapes(self, *args: Any, **kwargs: Any) -> Any:
        """Check the rules on meta tensors, and return the results of a call."""
        if self.rules is not None:
            self.rules(*args, **kwargs)
        if self.given_outputs:
            self.compare(self.expected(args, kwargs), kwargs["out"])
            return tuple(kwargs["out"])
        if self.shape_of is not None:
            return self.shape_of(*args, **kwargs)
        if self.meta is None:
            return self.reference(*args, **kwargs)
        return self.meta(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Check the rules on CPU tensors, run the reference, and compare its results with the meta function."""
        if self.rules is not None:
            self.rules(*args, **kwargs)
        result = self.reference(*args, **kwargs)
        if self.meta is not None:
            self.compare(self.expected(args, kwargs), result)
        return result

    def expected(self, args: Any, kwargs: Any) -> Any:
        if self.meta is None:
            return None
        kept = {name: to_meta(value) for name, value in kwargs.items() if name not in ("out", "workspace")}
        try:
            return self.meta(*to_meta(args), **kept)
        except TypeError as error:
            # npu_top_k_top_p's requires k, unlike the schema; the dispatcher omits a trailing None.
            if "required positional argument" in str(error):
                return None
            raise

    def compare(self, expected: Any, result: Any) -> None:
        if expected is None:
            return
        wanted = [value for value in flat(expected) if isinstance(value, Tensor)]
        found = [value for value in flat(result) if isinstance(value, Tensor)]
        if len(wanted) != len(found):
            raise MetaMismatch(f"{self.name}: the vendor returns {len(wanted)} tensors, the reference {len(found)}")
        for index, (want, got) in enumerate(zip(wanted, found, strict=True)):
            if want.shape != got.shape or want.dtype != got.dtype:
                raise MetaMismatch(
                    f"{self.name}: result {index} is {tuple(got.shape)} {got.dtype}, "
                    f"the vendor's meta function says {tuple(want.shape)} {want.dtype}"
                )


def meta_function(overload: Any, entry: Reference) -> Callable[..., Any] | None:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    chosen: Any = overload if entry.like is None else overload_of(f"npu::{entry.like}")
    name = f"{chosen._schema.name}.{chosen._schema.overload_name}".rstrip(".")
    return chosen if has(name, "Meta") and (entry.like is not None or not entry.host) else None
