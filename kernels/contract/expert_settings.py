"""Where the experts of expert-parallel layers are, and when they move, as plain data. No torch."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["DispatchAlgorithm", "ExchangeMode", "ExchangeSettings", "ExpertSettings", "RebalanceSettings"]

DispatchAlgorithm = Literal["static", "dynamic"]
"""Which copy of an expert a token takes: a fixed one for each source rank, where row r of a pass counts as one of rank
``r % ranks``; or any, so that tokens are divided equally over all copies."""


ExchangeMode = Literal["auto", "normal", "low_latency"]
"""How rows travel to the ranks of their experts. normal: counts first, then the rows that a rank has experts of.
low_latency: every rank gets as many rows as the step says, without counts, so that no host waits for a device. auto:
low_latency for steps of few rows, such as decodes."""


class ExchangeSettings(msgspec.Struct, frozen=True):
    """Ranks of data-parallel attention send rows to the experts that they take and get back results (all-to-all)."""

    mode: ExchangeMode = "auto"
    overlap: bool = False  # the shared expert runs while rows travel


class RebalanceSettings(msgspec.Struct, frozen=True):
    """When experts move between ranks (EPLB)."""

    iterations: int = 1000  # steps until the next placement
    layers_per_chunk: int = 1  # layers whose experts move between two steps
    min_utilization: float = 1.0  # a placement whose mean ``utilization`` is higher stays


class ExpertSettings(msgspec.Struct, frozen=True):
    """The places of experts. ``location``: trivial, a JSON object, or the path of a JSON file (see
    ``expert_placement.read_location``)."""

    redundant: int = 0  # places of a layer beyond one for each expert
    dispatch: DispatchAlgorithm = "static"
    location: str = "trivial"
    rebalance: RebalanceSettings | None = None  # None: experts do not move
