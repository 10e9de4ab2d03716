"""What adapters add to a linear layer, by two kernels that read the matrices of the adapters in use alone (Punica, Chen
et al., arXiv 2310.18547).

Places are not sorted: a program is for one place and some rows, and ends at once if none of them has this place. So
shapes do not depend on which rows have which adapter, and a captured graph serves any mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.core.layer_context import LayerContext
from kernels.devices.cuda.launch import overlapping
from kernels.devices.cuda.matmul.low_rank_many import LowRankMany
from kernels.devices.cuda.matmul.low_rank_one import Adapter
from kernels.devices.low_rank import LowRankDelta

if TYPE_CHECKING:
    from kernels.devices.cuda.matmul.gemm_small_tma import Extension

__all__ = ["CudaLowRankDelta", "add_low_rank", "make_up"]

_BLOCK: Final = 128  # inputs of a step, and outputs of a program
_SPLIT: Final = 512  # inputs of a program, where there are so few rows that they do not fill the device
_MAX_SPLITS: Final = 16
_INVARIANT_SPLITS: Final = 4  # of any number of rows
_FEW: Final = 256  # rows
_SMALL: Final = 64  # most rows of the kernels that wait for few
_OUTPUTS: Final = 64  # of a program of the product, all of one module
_MAX_RANK: Final = 128  # of a program: more does not fit shared memory in float32


@triton.jit(do_not_specialize=["rows"])
def low_rank_down_kernel(
    x,
    places,
    down,
    low,
    rows,
    stride,
    inputs,
    split,
    modules,
    rank: tl.constexpr,
    row_block: tl.constexpr,
    rank_block: tl.constexpr,
    chunks: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
):
    """``low`` float32 [splits, rows, modules * rank]: the sums of ``split`` inputs each, of ``x`` [rows, inputs], whose
    rows are ``stride`` apart, times ``down`` [places, modules * rank, inputs]. Rows of place 0 are not written. A
    program is for one of ``chunks`` of a rank."""
    place, chunk, pair = tl.program_id(1) + 1, tl.program_id(2) % chunks, tl.program_id(2) // chunks
    part, module = pair // modules, pair % modules
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    at = chunk * rank_block + tl.arange(0, rank_block)
    column = tl.arange(0, block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    own = tl.load(places + row, mask=row < rows, other=0) == place
    if tl.max(own.to(tl.int32), 0) > 0:
        total = tl.zeros([row_block, rank_block], tl.float32)
        first = x + row[:, None].to(tl.int64) * stride
        second = down + (place * modules + module).to(tl.int64) * rank * inputs + at[None, :] * inputs
        for begin in range(part * split, tl.minimum(part * split + split, inputs), block):
            here = begin + column
            left = tl.load(first + here[None, :], mask=own[:, None] & (here < inputs)[None, :], other=0.0)
            right = tl.load(second + here[:, None], mask=(at < rank)[None, :] & (here < inputs)[:, None], other=0.0)
            total = tl.dot(left, right, total, input_precision="ieee")
        there = (part * rows + row[:, None]).to(tl.int64) * (modules * rank) + module * rank + at[None, :]
        tl.store(low + there, total, mask=own[:, None] & (at < rank)[None, :])


@triton.jit(do_not_specialize=["rows"])
def low_rank_up_kernel(
    low,
    places,
    up,
    tiles,
    out,
    rows,
    stride,
    lines_apart,
    outputs_apart,
    places_apart,
    modules,
    most,
    splits: tl.constexpr,
    rank: tl.constexpr,
    row_block: tl.constexpr,
    rank_block: tl.constexpr,
    block: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
):
    """Adds to ``out`` [rows, outputs], whose rows are ``stride`` apart, the sum of ``low``'s splits times ``up``
    [places, rank, outputs]. ``tiles`` int32 [tiles, 3]: a tile's first column, the end of its module's, the module.
    ``most``: the last place. Not ``adds``: overwrites ``out``, with zeros where there is no adapter."""
    tile = tiles + tl.program_id(1) * 3
    column = tl.load(tile) + tl.arange(0, block)
    here = column < tl.load(tile + 1)
    module = tl.load(tile + 2)
    row = tl.program_id(0) * row_block + tl.arange(0, row_block)
    at = tl.arange(0, rank_block)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.load(places + row, mask=row < rows, other=0)
    target = out + row[:, None].to(tl.int64) * stride + column[None, :]
    if tl.max(place, 0) > 0:
        total = tl.zeros([row_block, block], tl.float32)
        first = tl.min(tl.where(place > 0, place, most), 0).to(tl.int32)
        for number in range(first, tl.max(place, 0).to(tl.int32) + 1):
            own = place == number
            if tl.max(own.to(tl.int32), 0) > 0:
                for begin in range(0, rank, rank_block):
                    inside = begin + at < rank
                    there = row[:, None].to(tl.int64) * (modules * rank) + module * rank + begin + at[None, :]
                    known = own[:, None] & inside[None, :]
                    left = tl.zeros([row_block, rank_block], tl.float32)
                    for part in range(splits):
                        left += tl.load(
                            low + part * rows.to(tl.int64) * (modules * rank) + there, mask=known, other=0.0
                        )
                    lines = number * places_apart + (begin + at[:, None]).to(tl.int64) * lines_apart
                    right = tl.load(
                        up + lines + column[None, :].to(tl.int64) * outputs_apart,
                        mask=inside[:, None] & here[None, :],
                        other=0.0,
                    )
                    total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        known = (place > 0)[:, None] & here[None, :]
        if adds:
            total += tl.load(target, mask=known, other=0.0).to(tl.float32)
        else:
            known = (row < rows)[:, None] & here[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=known)
    elif not adds:
        nothing = tl.zeros([row_block, block], out.dtype.element_ty)
        tl.store(target, nothing, mask=(row < rows)[:, None] & here[None, :])


class CudaLowRankDelta(LowRankDelta):
    """``LowRankDelta`` by kernels that read the matrices of each adapter in use once for up to 64 rows. ``up`` as
    ``make_up`` lays it out. ``invariant``: what a row gets does not depend, bit by bit, on the other rows."""

    def __init__(
        self, context: LayerContext, down: Tensor, up: Tensor, sizes: Sequence[int], *, invariant: bool = False
    ) -> None:
        super().__init__(context, down, up, sizes)
        self._invariant = invariant
        tiles = [
            (column, end, module)
            for module, (begin, end) in enumerate(self.columns)
            for column in range(begin, end, _BLOCK)
        ]
        self._tiles = torch.tensor(tiles, dtype=torch.int32, device=down.device)
        self._ends = torch.tensor([end for _, end in self.columns], dtype=torch.int32, device=down.device)
        self._counters = torch.zeros(down[:, :, 0].numel() + 1, dtype=torch.int32, device=down.device)
        self._sums = torch.zeros(down.shape[1], dtype=torch.int64, device=down.device)
        self._current, self._run = context.count_passes(), 0
        self._prompts: LowRankMany | None = None
        if not invariant and down.element_size() == 2 and down.is_contiguous() and up.stride(1) == 1:
            self._prompts = LowRankMany.of(down, _by_outputs(up), self.columns, self.rank)

    def __call__(self, x: Tensor, outputs: Tensor) -> Tensor:
        """``x`` [rows, inputs], ``outputs`` [rows, outputs], which is overwritten and returned."""
        if self.context.idle:
            return outputs
        if (many := self._takes(x)) is not None:
            return many.add(x, self.context.rows, outputs, adds=True)
        return add_low_rank(x, self.context.rows, self.down, self.up, self._tiles, outputs, invariant=self._invariant)

    def alone(self, x: Tensor) -> Tensor:
        """What is added, [rows, outputs], for a product that adds itself to it."""
        outputs = x.new_empty((len(x), self.up.shape[2]))
        if (many := self._takes(x)) is not None:
            return many.add(x, self.context.rows, outputs, adds=False)
        return add_low_rank(x, self.context.rows, self.down, self.up, self._tiles, outputs, adds=False)

    def _takes(self, x: Tensor) -> LowRankMany | None:
        """The kernels for many tokens, if they support these."""
        return self._prompts if len(x) > _SMALL and x.dtype == self.down.dtype else None

    @property
    def extends(self) -> bool:
        """Whether ``extension`` supports the layer: its kernel takes 64 outputs, and 16 bytes, at a time."""
        whole = all(end % _OUTPUTS == 0 for _, end in self.columns)
        return whole and self.rank % 8 == 0 and self.down.shape[2] % 8 == 0

    @property
    def joins(self) -> bool:
        """Whether the kernel for one token supports the layer (``one``), which it does once a pass."""
        return self.extends and self.down.is_contiguous() and self._run != self.context.passes

    def one(self) -> Adapter:
        """For ``low_rank_one.multiply`` of the pass's one token, which is launched next."""
        self._run = self.context.passes
        up = _by_outputs(self.up)
        return Adapter(self.context.rows, self.down, up, self._ends, self._sums, self._current, self.rank)

    def extension(self, x: Tensor) -> Extension:
        """For the kernel of a product of up to 64 tokens ``x`` [tokens, inputs], which is launched next."""
        from kernels.devices.cuda.matmul import gemm_small_tma, low_rank_few

        places = self.context.rows
        low, begun = low_rank_few.shrink(x, places, self.down, self.rank, self._counters)
        up = _by_outputs(self.up)[:, self.rank :]
        return gemm_small_tma.Extension(
            low, up, places, begun, self._ends, len(self.columns), self.rank, low_rank_few.STEP,
            low_rank_few.shared_memory(len(x)),
        )  # fmt: skip


def make_up(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [layers, places, rank, outputs]: an output's numbers of all places are contiguous, and begin at multiples
    of 16 bytes."""
    layers, places, rank, outputs = shape
    width = triton.cdiv(places * rank, 8) * 8
    held = torch.zeros(layers, outputs, width, dtype=dtype, device=device)
    return held.as_strided(shape, (outputs * width, rank, 1, width))


def _by_outputs(up: Tensor) -> Tensor:
    """[outputs, places * rank] of what ``make_up`` made."""
    places, rank, outputs = up.shape
    return up.as_strided((outputs, places * rank), (up.stride(2), 1))


def add_low_rank(
    x: Tensor,
    places: Tensor,
    down: Tensor,
    up: Tensor,
    tiles: Tensor,
    outputs: Tensor,
    *,
    adds: bool = True,
    invariant: bool = False,
) -> Tensor:
    """``LowRankDelta`` of rows whose ``places`` are given, int64 [rows]; ``tiles``: see ``low_rank_up_kernel``. Not
    ``adds``: overwrites ``outputs``. ``invariant``: sums are divided alike for any number of rows. Other places add
    zeros to the sums of a row."""
    rows, inputs = x.shape
    most, rank, modules = len(down) - 1, up.shape[1], down.shape[1] // up.shape[1]
    x = x if x.stride(1) == 1 else x.contiguous()
    most_splits = _INVARIANT_SPLITS if invariant else _MAX_SPLITS if rows <= _FEW else 1
    splits = min(most_splits, triton.cdiv(inputs, _SPLIT))
    split = triton.cdiv(triton.cdiv(inputs, splits), _BLOCK) * _BLOCK
    low = torch.empty((splits, rows, modules * rank), dtype=torch.float32, device=x.device)
    rank_block = min(max(16, triton.next_power_of_2(rank)), _MAX_RANK)
    chunks = triton.cdiv(rank, rank_block)
    row_block = min(max(16, 4096 // rank_block), 64)
    if not invariant:
        row_block = min(row_block, max(16, triton.next_power_of_2(rows)))
    blocks, pdl, warps = (
        triton.cdiv(rows, row_block),
        overlapping(x.device),
        8 if max(row_block, rank_block) >= 64 else 4,
    )
    low_rank_down_kernel[(blocks, most, splits * modules * chunks)](
        x, places, down, low, rows, x.stride(0), inputs, split,
        modules, rank, row_block, rank_block, chunks, _BLOCK, pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    low_rank_up_kernel[(blocks, len(tiles))](
        low, places, up, tiles, outputs, rows, outputs.stride(0), up.stride(1), up.stride(2), up.stride(0), modules,
        most, splits, rank, row_block, min(32, rank_block), _BLOCK, adds, pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip
    return outputs
