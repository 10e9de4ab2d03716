"""The model in one call, where the device is the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.batch import ForwardBatch
from kernels.models.decoder import Decoder
from kernels.platforms.base import Platform
from kernels.platforms.operators import Draw, Draws
from kernels.platforms.prepared import HostPass
from kernels.platforms.rows import DecodeTokens

__all__ = ["HostTarget"]

Bools = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HostTarget:
    """Leaves of each token ``features`` [tokens, n], as their bits, its ``logits`` [tokens, vocab], the likeliest next
    one in ``tokens`` and in ``broken`` whether its logits are not to be used. ``draw``: the platform's.
    """

    run: HostPass
    features: npt.NDArray[np.int16]
    logits: Tensor
    tokens: Longs
    broken: Bools
    draw: Draw | None

    @classmethod
    def make(
        cls,
        platform: Platform,
        model: Decoder,
        caches: list[object],
        windows: Sequence[int],
        tokens: int,
        capture: bool = True,
    ) -> HostTarget | None:
        """For up to so many ``tokens``; None where the platform makes no such calls. Without ``capture`` the features
        are the last hidden state, whatever a draft wants."""
        greedy = platform.greedy
        if greedy is None:
            return None
        kept: list[Tensor] = []

        def whole(batch: ForwardBatch) -> Tensor:
            result = model.forward(batch, caches, capture)
            hidden, features = model.split(result) if capture else (result, result)
            logits = model.logits(hidden)
            kept.extend((features, logits, *greedy(logits)))
            return result

        run = platform.capture_pass(whole, windows, tokens)
        if run is None or kept[0].dtype != torch.bfloat16:
            return None
        features, logits, likeliest, broken = kept
        bits: npt.NDArray[np.int16] = features.view(torch.int16).numpy()
        return cls(run, bits, logits, likeliest.numpy(), broken.numpy(), platform.draw)

    def next(self, rows: DecodeTokens, draws: Draws | None, positions: Longs) -> tuple[Longs, Bools]:
        """Run ``rows``. -> what follows each of their tokens, and whether its logits are not to be used.

        ``draws`` [tokens]: how it is sampled; None: all want the likeliest. ``positions`` int64 [tokens]: where it will
        stand.
        """
        self.run(rows)
        count = len(rows.ids)
        if draws is None:
            return self.tokens[:count], self.broken[:count]
        assert self.draw is not None
        logits = self.logits[:count]
        drawn = self.draw(logits, draws, torch.from_numpy(positions), None, logits.shape[1])
        assert drawn is not None, "the platform recorded the pass"
        return drawn[0].numpy(), self.broken[:count]
