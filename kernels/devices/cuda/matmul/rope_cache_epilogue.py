"""Rotation of heads and the write of keys and values to the cache, inside
``kernels.devices.cuda.matmul.gemv_quantized``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["load_rope_epilogue", "store_rope_epilogue"]


@gluon.jit
def _halves(values, rows: gl.constexpr, warps: gl.constexpr):
    """Indices of a program's rows."""
    pairs: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])
    return gl.split(gl.convert_layout(values.reshape(2, rows // 2).permute(1, 0), pairs))


@gluon.jit
def load_rope_epilogue(row, cos, sin, index, dim: gl.constexpr, rows: gl.constexpr, warps: gl.constexpr):
    """Values known before the product: the first half of its rows, their cosines and sines, and the token's place."""
    first, _ = _halves(row, rows, warps)
    c = gl.load(cos + first % dim).to(gl.float32)
    s = gl.load(sin + first % dim).to(gl.float32)
    return first, c, s, gl.load(index)


@gluon.jit
def store_rope_epilogue(
    found,
    turning,
    out,
    cache,
    heads,
    kv_heads,
    dim: gl.constexpr,
    page_size: gl.constexpr,
    rows: gl.constexpr,
    warps: gl.constexpr,
):
    """``found``: results of the program's rows, rounded as by the separate kernel, ``norm_rope_cache``."""
    like: gl.constexpr = out.dtype.element_ty
    half: gl.constexpr = dim // 2
    first, c, s, place = turning
    low, high = _halves(found.to(gl.float32), rows, warps)
    head = first // dim
    turns = head < heads + kv_heads
    one = gl.where(turns, low * c + high * s, low).to(like)
    two = gl.where(turns, high * c - low * s, high).to(like)
    asks = head < heads
    gl.store(out + first, one, mask=asks)
    gl.store(out + first + half, two, mask=asks)
    # Head `heads + h` is key head h: slot h of the page; values follow the keys in both.
    line = (place // page_size * (2 * kv_heads) + (head - heads)) * page_size + place % page_size
    to = cache + line * dim + first % dim
    kept = (head >= heads) & (head < heads + 2 * kv_heads)
    gl.store(to, one, mask=kept)
    gl.store(to + half, two, mask=kept)
