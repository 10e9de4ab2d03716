"""Rotary position embedding: half mode pairs element i with i + D/2, interleave mode 2i with 2i + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import contiguous, dtypes, require, same_dtype
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def turned(x: Tensor, mode: str) -> Tensor:
    """(-x2, x1) of each pair."""
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)
    first, second = x[..., ::2], x[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    wide = x.float()
    return (wide * cos.float() + turned(wide, mode) * sin.float()).to(x.dtype)


def rotary_mul_rules(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> None:
    """Documented: 4-D, one dtype, cos and sin full width and broadcast over heads, D even and < 896, B and
    N < 1000."""
    name = "npu_rotary_mul"
    require(rotary_mode in ("half", "interleave"), name, "rotary_mode", f"{rotary_mode!r} is not half or interleave")
    require(rotate is None, name, "rotate", "is not simulated: leave it None")
    dtypes(name, FLOATS, input=input, r1=r1, r2=r2)
    same_dtype(name, input=input, r1=r1, r2=r2)
    for argument, tensor in (("input", input), ("r1", r1), ("r2", r2)):
        require(tensor.dim() == 4, name, argument, f"must have 4 dimensions, has shape {tuple(tensor.shape)}")
    d = input.shape[-1]
    require(d % 2 == 0 and d < 896, name, "input", f"head dim {d} must be even and below 896")
    require(r1.shape == r2.shape, name, "r2", f"shape {tuple(r2.shape)} must be r1's {tuple(r1.shape)}")
    require(r1.shape[-1] == d, name, "r1", f"must be {d} wide like the input (repeat the half), is {r1.shape[-1]}")
    x, c = tuple(input.shape[:3]), tuple(r1.shape[:3])
    shapes = {  # layout: (batch, heads), the shapes of cos and sin; interleave takes the first only
        "BNSD": (x[0], x[1], [(1, 1, x[2]), (x[0], 1, x[2]), x]),
        "BSND": (x[0], x[2], [(1, x[1], 1), (x[0], x[1], 1), x]),
        "SBND": (x[1], x[2], [(x[0], 1, 1), (x[0], x[1], 1), x]),
    }
    for batch, heads, forms in shapes.values():
        small = batch * heads < 1000 if rotary_mode == "interleave" else batch < 1000 and heads < 1000
        if small and c in (forms[:1] if rotary_mode == "interleave" else forms):
            return
    rule = f"{tuple(r1.shape)} fits {tuple(input.shape)} in no layout (BNSD, BSND, SBND; B and N below 1000)"
    require(False, name, "r1", rule)


@reference("npu_rotary_mul", rules=rotary_mul_rules)
def npu_rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    return rotated(input, r1, r2, rotary_mode)


def apply_rules(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> None:
    """Vendor, for A2 and A3: layouts BSND (4-D) and TND (3-D), half mode, D 64 or 128, all dtypes equal, cos and sin
    with one head and the tokens of the query."""
    name = "npu_apply_rotary_pos_emb"
    require(layout in ("BSND", "TND"), name, "layout", f"{layout!r} is not BSND or TND (A2, A3)")
    require(rotary_mode == "half", name, "rotary_mode", f"{rotary_mode!r} is not half (A2, A3)")
    dtypes(name, FLOATS, query=query)
    same_dtype(name, query=query, key=key, cos=cos, sin=sin)
    contiguous(name, query=query, key=key, cos=cos, sin=sin)
    dims = 3 if layout == "TND" else 4
    for argument, tensor in (("query", query), ("key", key), ("cos", cos), ("sin", sin)):
        require(tensor.dim() == dims, name, argument, f"must have {dims} dimensions in {layout}, has {tensor.dim()}")
        same = tensor.shape[: dims - 2] == query.shape[: dims - 2]
        require(same, name, argument, f"tokens of {tuple(tensor.shape)} must be the query's {tuple(query.shape)}")
        require(tensor.numel(), name, argument, "must not be empty")
    d = query.shape[-1]
    require(d in (64, 128), name, "query", f"head dim {d} must be 64 or 128 (A2, A3)")
    require(key.shape[-1] == d, name, "key", f"head dim {key.shape[-1]} must be the query's {d}")
    for argument, tensor in (("cos", cos), ("sin", sin)):
        require(tensor.shape[-2] == 1, name, argument, f"must have one head, has {tensor.shape[-2]}")
        require(tensor.shape[-1] == d, name, argument, f"must be {d} wide, is {tensor.shape[-1]}")


@reference("npu_apply_rotary_pos_emb", rules=apply_rules)
def npu_apply_rotary_pos_emb(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str = "BSND", rotary_mode: str = "half"
) -> tuple[Tensor, Tensor]:
    """Returns new tensors, as the schema says. The vendor's text speaks of an update in place: do not read the inputs
    afterwards."""
    return rotated(query, cos, sin, rotary_mode), rotated(key, cos, sin, rotary_mode)
