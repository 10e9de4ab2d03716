"""A device's own kernels for choosing tokens."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.core.operators import Draw, Greedy, MaskLogits, TopKTopP

__all__ = ["SamplingKernels"]


@dataclass(frozen=True)
class SamplingKernels:
    """None: the sampler runs plain torch instead.

    ``greedy``: the argmax of each row. ``draw``: whole rows sampled in one kernel. ``top_k_top_p``: the tokens that
    top-k and top-p keep. ``mask``: applies the masks of grammars.
    """

    greedy: Greedy | None = None
    draw: Draw | None = None
    top_k_top_p: TopKTopP | None = None
    mask: MaskLogits | None = None
