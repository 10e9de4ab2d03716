"""Convolutions whose states are the last inputs, for layers that are no more than that."""

from __future__ import annotations

from torch import Tensor

from kernels.core.batch import StateSegments

__all__ = ["Convolution"]


class Convolution:
    """Steps of causal convolutions. A device overrides what it has kernels for."""

    def step(
        self, mixed: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, segment: StateSegments, out: Tensor
    ) -> bool:
        """Run a segment of one token a row: the sums over the ``mixed`` [tokens, channels] of each token and of those
        before it in ``states`` [pages, taps - 1, channels] go to ``out`` [tokens, channels]. ``weight`` float32 [taps,
        channels], ``bias`` [channels]. -> False: nothing has run, as the device has no kernel for it.
        """
        return False
