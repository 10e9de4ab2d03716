"""Captures on the CPU: programs of native operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from kernels.core.batch import ForwardBatch
from kernels.devices.capture import Capture, CaptureRequest
from kernels.devices.cpu.attention import CpuAttention
from kernels.devices.cpu.decode_loop import CpuPass
from kernels.devices.cpu.native_operators import NativeOperators
from kernels.devices.cpu.paged_attention import SHORT, with_short
from kernels.devices.cpu.program import Program
from kernels.devices.prepared import CapturedPasses, NativePass

__all__ = ["CpuCapture"]

_LONGEST = 256  # tokens of a prompt in a program: without one, the last layer computes only what is read of longer ones


class CpuCapture(Capture):
    """Records passes of any drafts and chunks of prompts. Ranks that run a model together have collectives between
    their operators, which no program has: with several ``ranks`` nothing is recorded.
    """

    def __init__(self, native: NativeOperators, attention: CpuAttention, ranks: int) -> None:
        self._native = native
        self._attention = attention
        self._ranks = ranks

    def decodes(self, request: CaptureRequest) -> CapturedPasses | None:
        max_tokens, states = max(request.max_rows * request.tokens, request.prompts), request.states
        held = None if states is None else states.new_zeros(max_tokens, states.shape[1])
        program = self.record(request.forward, request.windows, max_tokens, held)
        if program is None:
            return None

        def decode(batch: ForwardBatch) -> Tensor | None:
            return program.run(batch, with_short(next(iter(batch.plans.values())).rows))

        prompts = min(max_tokens, SHORT if program.latent else _LONGEST)
        return CapturedPasses((request.max_rows,), decode, prompts, states=held)

    def native_pass(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        windows: Sequence[int],
        max_tokens: int,
        states: Tensor | None = None,
    ) -> NativePass | None:
        program = self.record(forward, windows, max_tokens, states)
        return None if program is None else CpuPass(program)

    def record(
        self, forward: Callable[[ForwardBatch], Tensor], windows: Sequence[int], tokens: int, states: Tensor | None
    ) -> Program | None:
        """``forward`` of up to ``tokens`` tokens as a program, whose batch has ``states``; None if it has operators
        that are not native."""
        native = self._native.current
        if native is None or self._ranks > 1:
            return None
        return Program.record(native, forward, windows, self._attention.plan, tokens, states)
