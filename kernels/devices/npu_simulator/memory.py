"""Device memory of the simulator is host memory: converts between NPU tensors and CPU aliases of the same bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch_npu
from torch import Tensor

from kernels.devices.npu_simulator.constraints import ConstraintError

__all__ = ["NZ", "Aliases", "is_npu", "new_like"]

NZ = 29

MAX_CACHED = 65536


def is_npu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "npu"


def new_like(result: Tensor, device: torch.device) -> Tensor:
    """An uninitialised tensor on ``device`` with the shape, strides and dtype of ``result`` (its own storage)."""
    return torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=device)


class NzGuard:
    """Tracks the memory of NZ tensors and the valid views of it."""

    def __init__(self) -> None:
        self._shapes: dict[int, tuple[int, ...]] = {}

    def add(self, tensor: Tensor) -> None:
        self._shapes[tensor.untyped_storage().data_ptr()] = tuple(tensor.shape)

    def __bool__(self) -> bool:
        return bool(self._shapes)

    def check(self, tensor: Tensor) -> None:
        """Check a ``tensor`` that is about to be read: only the whole tensor and its transpose are allowed."""
        address = tensor.untyped_storage().data_ptr()
        shape = self._shapes.get(address)
        if shape is None:
            return
        if torch_npu.get_npu_format(tensor) != NZ:
            del self._shapes[address]  # freed and reused by another tensor
            return
        seen = tuple(tensor.shape)
        if seen != shape and seen != (*shape[:-2], shape[-1], shape[-2]):
            rule = f"NZ memory of shape {shape} cannot be sliced or seen as {seen}: cast it back to ND (2) first"
            raise ConstraintError("format", "tensor", rule)


class Aliases:
    """CPU tensors that alias the memory of NPU tensors, without ownership: the NPU tensor must outlive their use."""

    def __init__(self) -> None:
        self.nz = NzGuard()
        self._whole: dict[tuple[int, int, torch.dtype], Tensor] = {}  # by address: valid for any allocation there

    def of(self, tensor: Tensor) -> Tensor:
        """``tensor``'s memory, shape and strides as a CPU tensor."""
        if self.nz:
            self.nz.check(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if not size or not tensor.numel():
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
        key = (storage.data_ptr(), size, tensor.dtype)
        whole = self._whole.get(key)
        if whole is None:
            whole = self._see(*key)
        return whole.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _see(self, address: int, size: int, dtype: torch.dtype) -> Tensor:
        """All of a storage's elements. Its views may be written to in inference mode and out of it."""
        if len(self._whole) >= MAX_CACHED:
            self._whole.clear()
        memory = (ctypes.c_byte * size).from_address(address)
        with torch.inference_mode(False):
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            whole = torch.empty(0, dtype=dtype).set_(storage, 0, (size // dtype.itemsize,), (1,))
        self._whole[address, size, dtype] = whole
        return whole

    def copy_of(self, result: Tensor, device: torch.device) -> Tensor:
        """``result``, a CPU tensor, as a new tensor on ``device``."""
        made = new_like(result, device)
        if result.is_contiguous() and not result.is_complex():  # which may be a conjugate that is not computed yet
            ctypes.memmove(made.data_ptr(), result.data_ptr(), result.nbytes)
        else:
            self.of(made).copy_(result)
        return made
