"""Take over torch_npu's own operators: a checked reference for those that have one, a named refusal for all others."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import warnings
from typing import Any

import torch

from kernels.devices.npu_simulator import operators
from kernels.devices.npu_simulator.aten import overload_of, refuse
from kernels.devices.npu_simulator.checking import CheckedOperator, SchemaMismatch
from kernels.devices.npu_simulator.dispatch import Engine
from kernels.devices.npu_simulator.formats import FORMAT_CASTS, FormatCast
from kernels.devices.npu_simulator.operators.reference import REFERENCES, Reference
from kernels.devices.npu_triton import operators as triton_operators

__all__ = ["OWN", "take_over_npu", "take_over_triton"]

OWN = frozenset(
    "npu::" + name
    for name in (
        *("empty_with_format", "unsafe_empty_with_format", "empty_with_swapped_memory", "get_npu_format"),
        *("get_storage_size", "npu_change_data_ptr", "super_kernel_scope_begin", "super_kernel_scope_end"),
        *("print_npugraph_tensor", "save_npugraph_tensor", "save_npugraph_tensor.tensor_list"),
    )
)
"""Operators of the wheel that need no device kernel and stay its own."""


def take_over_npu(engine: Engine, library: torch.library.Library) -> list[str]:
    """Register a kernel for every npu:: operator; ``library``: an IMPL library of npu. Returns the names simulated."""
    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    simulated: list[str] = []
    elsewhere: list[str] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Overriding a previously registered kernel.*")
        for name in torch._C._dispatch_get_all_op_names():
            if not name.startswith("npu::") or name in OWN or not has(name, "PrivateUse1"):
                continue
            short = name.removeprefix("npu::")
            entry = REFERENCES.get(short)
            if short in FORMAT_CASTS:
                library.impl(short, FormatCast(engine, overload_of(name)), "PrivateUse1")
                simulated.append(short)
                continue
            if entry is not None and engine.cann.spec.generation not in entry.generations:
                kinds = " and ".join(entry.generations)
                library.impl(short, refuse(name, f"the vendor has it for {kinds} only"), "PrivateUse1")
                elsewhere.append(short)
                continue
            if entry is None:
                library.impl(short, refuse(name), "PrivateUse1")
                continue
            overload = overload_of(name)
            hold_to_schema(overload, entry)
            library.impl(short, CheckedOperator(engine, overload, entry), "PrivateUse1")
            simulated.append(short)
    missing = sorted(set(REFERENCES) - set(simulated) - set(elsewhere))
    if missing:
        raise SchemaMismatch(
            f"the installed torch_npu has no operators {', '.join(missing)}: the simulator expects 2.13"
        )
    return sorted(simulated)


def take_over_triton(engine: Engine) -> None:
    """Register the references of the project's own kernels, checked as the vendor's operators are."""
    for name, compute in triton_operators.REFERENCES.items():
        overload = overload_of(f"{triton_operators.NAMESPACE}::{name}")
        entry = Reference(compute, triton_operators.check_contiguous, None, False, ())
        hold_to_schema(overload, entry)
        triton_operators.register(name, CheckedOperator(engine, overload, entry))


def hold_to_schema(overload: Any, entry: Reference) -> None:
    """The reference must have the vendor's argument names, order and defaults.

    ``**options`` stands for keyword-only arguments that it does not name.
    """
    parameters = inspect.signature(entry.compute).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = [parameter for parameter in parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    arguments = list(overload._schema.arguments)
    if open_ended:
        arguments = [argument for argument in arguments if not argument.kwarg_only]
    if [parameter.name for parameter in named] != [argument.name for argument in arguments]:
        raise SchemaMismatch(f"the reference of {overload} does not have the arguments of {overload._schema}")
    for parameter, argument in zip(named, arguments, strict=True):
        default = inspect.Parameter.empty if not argument.has_default_value() else argument.default_value
        if parameter.default != default:
            raise SchemaMismatch(
                f"the reference of {overload} has {parameter.name}={parameter.default!r}, the schema {default!r}"
            )
