"""Kernels of our own for Ascend NPUs, in plain Triton (Triton-Ascend), for what torch_npu has no operator for.

kernels.py      the kernels          reference.py    the same in torch
operators.py    registers both with the dispatcher   selection.py    which of them a device uses

Whether they compile for a device has not been seen: each is compared with its reference there before it is used.
"""
