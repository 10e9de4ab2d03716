"""Replaces the ``aten`` kernels that torch_npu registers for the NPU by CPU kernels on the same memory.

Allocation, views and set_ remain torch_npu's, so its allocator, storages and accounting are real. Values are those of
PyTorch's CPU kernels: sums in another order, the same dtype rules. An operator without a CPU kernel raises an error
with its name. Gradients are not simulated: some operators have none.

float64: a cast to it returns float32 with a warning, for every generation, by the wheel's rule. Tensors of it can still
be created. A2 and A3 compute in it slowly, on the AI CPU. Here A5 refuses it, the strictest interpretation of a device
without double precision, so that no code depends on it. 8-bit floats can only be moved, on every generation: A2 and A3
lack them, and some casts of A5 are reported to fail.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from kernels.devices.npu_simulator.constraints import ConstraintError
from kernels.devices.npu_simulator.dispatch import FLOATS_8, Call, Engine, Operator
from kernels.devices.npu_simulator.randomness import default_host_generator

__all__ = ["UnsimulatedOperator", "refuse", "take_over_aten"]

OWN = frozenset(
    "aten::" + name
    for name in (
        *("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
        *("view", "as_strided", "as_strided_", "_reshape_alias", "unfold", "resize_", "resize_as_", "_lazy_clone"),
        *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"),
        *("record_stream", "is_pinned", "_pin_memory", "pin_memory", "_to_copy", "to.dtype"),
        *("empty_with_format", "unsafe_empty_with_format", "empty_with_swapped_memory"),
        *("_copy_from", "_copy_from_and_resize", "npu_change_data_ptr", "get_npu_format", "get_storage_size"),
    )
)
"""Kernels of the wheel that are kept."""

MOVES = frozenset(f"aten::{name}" for name in ("copy_", "clone", "contiguous", "cat", "fill_", "zero_", "index_select"))
"""Operators that move or set values without computing."""

BYTES = frozenset(f"aten::{name}" for name in ("copy_", "clone", "contiguous", "zero_"))
"""Operators that move values of any dtype."""

KERNELS_ELSEWHERE = (
    "CPU",
    "CompositeExplicitAutograd",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


BEFORE_A5 = frozenset({"aten::cumprod"})
"""Operators of A2 and A3 only."""


SELDOM = FLOATS_8 | {torch.float64}
"""Dtypes for which there are rules."""


class UnsimulatedOperator(NotImplementedError):
    """The operator exists on the NPU but is not simulated."""


UNKNOWN = "add a reference implementation to kernels/devices/npu_simulator/operators, or use an operator that has one"


def refuse(name: str, why: str = UNKNOWN) -> Any:
    """A kernel that raises with the operator's name."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise UnsimulatedOperator(f"{name} is not simulated: {why}")

    return kernel


def overload_of(name: str) -> Any | None:
    """The overload object of ``namespace::operator.overload``, None when Python cannot see it."""
    namespace, _, rest = name.partition("::")
    operator, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), operator), overload or "default")
    except AttributeError:
        return None


def take_over_aten(engine: Engine, library: torch.library.Library) -> int:
    """Register a kernel for each operator; returns their number. ``library``: an IMPL library of aten."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    from kernels.devices.npu_simulator.ordering import operator_class

    count = 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("aten::") or name in OWN or not has(name, "PrivateUse1"):
                continue
            if name.startswith(("aten::npu_", "aten::_npu_")):
                continue  # the wheel's alias of an npu:: operator
            overload = overload_of(name)
            if overload is None:
                continue
            if not any(has(name, key) for key in KERNELS_ELSEWHERE):
                library.impl(name.removeprefix("aten::"), refuse(name), "PrivateUse1")
                continue
            kind = RandomOperator if RandomOperator.takes(overload) else operator_class(name)
            operator = kind(engine, overload)
            library.impl(name.removeprefix("aten::"), operator, "PrivateUse1")
            if has(name, "AutogradPrivateUse1"):  # the wheel's kernel, which needs device kernels
                library.impl(name.removeprefix("aten::"), operator, "AutogradPrivateUse1")
            count += 1
    return count


class AtenOperator(Operator):
    """A CPU kernel."""

    def __init__(self, engine: Engine, overload: Any) -> None:
        super().__init__(engine, overload, overload, overload)
        self.aten_name = str(overload._schema.name)

    def allow(self, call: Call) -> None:
        name = self.aten_name
        if call.dtypes.isdisjoint(SELDOM) and name not in BEFORE_A5:
            return
        if call.dtypes & FLOATS_8 and not (name in BYTES and len(call.dtypes) == 1):
            rule = "8-bit floats cannot be computed with, concatenated or cast: do it on the host, or as bytes"
            raise ConstraintError(self.name, "dtype", rule)
        newest = self.engine.cann.spec.generation == "A5"
        if name in BEFORE_A5 and newest:
            raise ConstraintError(self.name, "self", "the vendor has no such kernel for A5")
        if torch.float64 in call.dtypes and newest and name not in MOVES:
            rule = "float64 is not computed in on A5: cast to float32 first"
            raise ConstraintError(self.name, "dtype", rule)


class RandomOperator(AtenOperator):
    """One that draws random numbers, from the NPU's generator."""

    @staticmethod
    def takes(overload: Any) -> bool:
        """Whether the overload draws random numbers."""
        return torch.Tag.nondeterministic_seeded in overload.tags and any(
            argument.name == "generator" for argument in overload._schema.arguments
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("generator") is None:
            positional = [argument.name for argument in self.overload._schema.arguments]
            has_generator = (
                len(args) > positional.index("generator") and args[positional.index("generator")] is not None
            )
            if not has_generator:
                kwargs["generator"] = default_host_generator(torch.npu.current_device())
                args = args[: positional.index("generator")] if "generator" in positional[: len(args)] else args
        return super().__call__(*args, **kwargs)
