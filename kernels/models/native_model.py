"""The model as one native call on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.core.arrays import Bools, Longs
from kernels.core.attention_rows import DecodeTokens
from kernels.core.batch import ForwardBatch
from kernels.core.operators import Draw, Draws
from kernels.devices.base import Device
from kernels.devices.prepared import NativePass, TargetOutput
from kernels.models.decoder import Decoder

__all__ = ["NativeModel"]


@dataclass(frozen=True)
class NativeModel:
    """Leaves of each token ``features`` [tokens, n], as their bits, its ``logits`` [tokens, vocab], their argmax in
    ``tokens``, and in ``nonfinite`` whether its logits are not to be used. ``draw``: the device's.
    """

    run: NativePass
    features: npt.NDArray[np.int16]
    logits: Tensor
    tokens: Longs
    nonfinite: Bools
    draw: Draw | None

    @property
    def output(self) -> TargetOutput:
        """Where the pass leaves its results."""
        return TargetOutput(self.logits, self.tokens, self.nonfinite)

    @classmethod
    def make(
        cls,
        device: Device,
        model: Decoder,
        caches: list[object],
        windows: Sequence[int],
        tokens: int,
        capture: bool = True,
    ) -> NativeModel | None:
        """For up to so many ``tokens``; None where the device makes no such calls. Without ``capture`` the features
        are the last hidden state, whatever a draft wants."""
        greedy = device.sampling.greedy
        if greedy is None:
            return None
        tensors: list[Tensor] = []

        def whole(batch: ForwardBatch) -> Tensor:
            result = model.forward(batch, caches, capture)
            hidden, features = model.split(result) if capture else (result, result)
            logits = model.logits(hidden)
            tensors.extend((features, logits, *greedy(logits)))
            return result

        run = device.capture.native_pass(whole, windows, tokens)
        if run is None or tensors[0].dtype != torch.bfloat16:
            return None
        features, logits, argmax, nonfinite = tensors
        bits: npt.NDArray[np.int16] = features.view(torch.int16).numpy()
        return cls(run, bits, logits, argmax.numpy(), nonfinite.numpy(), device.sampling.draw)

    def next(self, rows: DecodeTokens, draws: Draws | None, positions: Longs) -> tuple[Longs, Bools]:
        """Run ``rows``. -> what follows each of their tokens, and whether its logits are not to be used.

        ``draws`` [tokens]: how it is sampled; None: all are greedy. ``positions`` int64 [tokens]: where it will
        stand.
        """
        self.run(rows)
        count = len(rows.ids)
        if draws is None:
            return self.tokens[:count], self.nonfinite[:count]
        assert self.draw is not None
        logits = self.logits[:count]
        drawn = self.draw(logits, draws, torch.from_numpy(positions), None, logits.shape[1])
        assert drawn is not None, "the device recorded the pass"
        return drawn[0].numpy(), self.nonfinite[:count]
