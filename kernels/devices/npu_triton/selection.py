"""Which of our own kernels an NPU uses: those whose results on it are those of torch, where Triton-Ascend is installed.

The environment variable TROUPE_NPU_TRITON: ``0`` uses none, ``1`` requires the compiler, and on a simulated NPU runs
their references in their place. Without it they are used where the compiler is installed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.contract.environment import NPU_TRITON
from kernels.contract.errors import UnsupportedError
from kernels.core.operators import Draws, Masks
from kernels.devices.npu_triton.operators import NAMESPACE, REFERENCES, register, registered

__all__ = ["INPUTS", "OwnDraw", "check_kernel", "has_compiler", "pack_draws", "select_kernels"]

_CORES = 40
"""Programs of a kernel that loops over tokens, if the device does not say how many vector cores it has."""

_log = logging.getLogger("troupe.kernels.npu")


def select_kernels(device: torch.device) -> frozenset[str]:
    """The operators of ``REFERENCES`` to use on ``device``. Raises UnsupportedError if NPU_TRITON cannot be obeyed."""
    wanted = os.environ.get(NPU_TRITON, "")
    if wanted not in ("", "0", "1"):
        raise UnsupportedError(f"{NPU_TRITON}={wanted}: must be 0, 1 or unset")
    if wanted == "0":
        return frozenset()
    if has_compiler():
        return frozenset(name for name in REFERENCES if _passes(name, device))
    if wanted and not all(registered(name) for name in REFERENCES):
        raise UnsupportedError(f"{NPU_TRITON}=1 needs Triton-Ascend: pip install -e '.[npu-triton]'")
    return frozenset(REFERENCES if wanted else ())  # on a simulated NPU


def has_compiler() -> bool:
    """Whether the installed Triton compiles for Ascend NPUs."""
    return find_spec("triton") is not None and find_spec("triton.backends.ascend") is not None


def check_kernel(name: str, device: torch.device) -> str:
    """Compile a kernel for ``device`` and compare it with its reference on small inputs. What is wrong, "" if nothing
    is."""
    try:
        if not registered(name):
            register(name, _kernel(name, device))
        return _compare(name, device)
    except Exception as error:  # what its compiler may raise is unknown
        return f"{type(error).__name__}: {error}"


def _passes(name: str, device: torch.device) -> bool:
    wrong = check_kernel(name, device)
    if wrong:
        text = "Our own kernel %s is not used (%s): torch_npu's operators are. %s=0 silences this."
        _log.warning(text, name, wrong, NPU_TRITON)
    return not wrong


def _kernel(name: str, device: torch.device) -> Callable[..., object]:
    from kernels.devices.npu_triton import kernels

    if name == "draw":
        return kernels.draw
    return partial(kernels.split_norm_rope_cache, programs=_programs(device))


def _programs(device: torch.device) -> int:
    return getattr(torch.npu.get_device_properties(device), "vector_core_num", 0) or _CORES


def _compare(name: str, device: torch.device) -> str:
    operator = getattr(getattr(torch.ops, NAMESPACE), name)
    for inputs in INPUTS[name](_programs(device)):
        here = [value.to(device) if isinstance(value, Tensor) else value for value in inputs]
        results = _tensors(operator(*here)) + _tensors(here)
        for own, right in zip(results, _tensors(REFERENCES[name](*inputs)) + _tensors(inputs), strict=True):
            result = own.cpu()
            if right.is_floating_point():
                alike = torch.allclose(result, right, rtol=0.01, atol=0.02, equal_nan=True)
            else:
                alike = result.equal(right)
            if not alike:
                return "its results are not those of torch"
    return ""


def _tensors(values: object) -> list[Tensor]:
    parts = values if isinstance(values, (list, tuple)) else (values,)
    return [part for part in parts if isinstance(part, Tensor)]


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _projections(programs: int) -> list[list[object]]:
    """Arguments of ``split_norm_rope_cache``: heads that fill a block and that do not, with a norm and without, in
    caches that are wider; tokens for a part of the programs, and for several rounds of all."""
    generator, result = torch.Generator().manual_seed(1), list[list[object]]()
    for dtype, heads, kv_heads, dim, normed, tokens in (
        (torch.bfloat16, 16, 8, 128, True, 7),
        (torch.bfloat16, 6, 2, 64, False, 3 * programs),
        (torch.float16, 5, 1, 96, True, 3 * programs),
        (torch.float16, 4, 4, 96, False, 7),
    ):
        angles = _random(generator, tokens, 1, dim // 2)
        turned = [torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin())]
        pages = tokens // 128 + 2
        caches = [_random(generator, pages, 128, kv_heads, 128).to(dtype) for _ in range(2)]
        weight = _random(generator, heads + kv_heads, dim).to(dtype) if normed else None
        qkv = _random(generator, tokens, heads + 2 * kv_heads, dim).to(dtype)
        index = torch.randperm(pages * 128, generator=generator)[:tokens]
        result.append([qkv, weight, 1e-6, *turned, *caches, index, heads])
    return result


_KINDS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.0, 0, 0.5, 0.0),
    (1.3, 50, 0.9, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.5, 100, 0.9, 0.05),
)
"""How rows are sampled: temperature, top-k, top-p and min-p."""


def _logits(programs: int) -> list[list[object]]:
    """Arguments of ``draw``: rows with NaN, with +inf, of -inf alone, and of ties alone, and 28 others, sampled in each
    of ``_KINDS``; in both dtypes."""
    generator, result = torch.Generator().manual_seed(2), list[list[object]]()
    kinds = len(_KINDS)
    draws = np.zeros((8 * kinds, 6), np.int32)
    draws[:, :2] = np.random.default_rng(3).integers(-(2**31), 2**31, (len(draws), 2))
    floats = draws.view(np.float32)
    for place, (temperature, top_k, top_p, min_p) in enumerate(_KINDS * 8):
        floats[place, 2:5] = temperature, np.log(min_p) if min_p else -np.inf, top_p
        draws[place, 5] = top_k
    for dtype in (torch.bfloat16, torch.float32):
        logits = (_random(generator, len(draws), 5000) * 3).to(dtype)
        logits[:kinds, 4321], logits[kinds : 2 * kinds, 69] = torch.nan, torch.inf
        logits[2 * kinds : 3 * kinds], logits[3 * kinds : 4 * kinds] = -torch.inf, 1.0
        result.append([logits, torch.from_numpy(draws), torch.arange(len(draws))])
    return result


INPUTS: dict[str, Callable[[int], list[list[object]]]] = {"split_norm_rope_cache": _projections, "draw": _logits}
"""Arguments on which a kernel that runs so many programs is compared with its reference."""


def pack_draws(draws: Draws) -> npt.NDArray[np.int32]:
    """``draws`` as ``reference.draw`` takes them: int32 [rows, 6]."""
    result = np.empty((len(draws), 6), np.int32)
    floats = result.view(np.float32)
    result[:, :2], result[:, 5] = draws["keys"], draws["top_k"]
    for column, name in enumerate(("temperature", "log_min_p", "top_p"), 2):
        floats[:, column] = draws[name]
    return result


class OwnDraw:
    """``core.operators.Draw`` by our own kernel. ``put``: copies an array to the device."""

    def __init__(self, put: Callable[[npt.NDArray[np.int32]], Tensor]) -> None:
        self._put = put
        self._last: tuple[Draws, Tensor] | None = None  # a batch's are the same in every step

    def __call__(
        self,
        logits: Tensor,
        draws: Draws,
        positions: Tensor,
        ids: Tensor | None,
        vocab: int,
        masks: Masks | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """See ``core.operators.Draw``."""
        if ids is not None or masks is not None or rows is not None:
            return None
        if self._last is None or self._last[0] is not draws:
            self._last = draws, self._put(pack_draws(draws))
        tokens, nonfinite = torch.ops.troupe.draw(logits.contiguous(), self._last[1], positions)
        return tokens, nonfinite
