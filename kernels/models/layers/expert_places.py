"""The places of experts on ranks, layer by layer, where they are not divided in their order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.contract.errors import ConfigError
from kernels.contract.expert_placement import Placement, dispatch_table
from kernels.contract.expert_settings import DispatchAlgorithm
from kernels.devices.experts import Dispatch, Experts

__all__ = ["ExpertPlaces", "PlacedLayer"]


@dataclass(eq=False)
class PlacedLayer:
    """``placement`` int64 [places]: the expert in each place. ``experts``: None until the layer is made."""

    placement: Placement
    dispatch: Dispatch
    experts: Experts | None = None


class ExpertPlaces:
    """Where the ``count`` experts of each layer are. ``placement`` int64 [sparse layers, places]: the expert in each
    place, part after part of ``parts``. ``algorithm``: which copy of an expert a token takes. ``source``: as in
    ``Dispatch``. Layers take theirs in their order. ``moves``: whether experts change their places later.
    """

    def __init__(
        self,
        placement: Placement,
        count: int,
        parts: int,
        algorithm: DispatchAlgorithm,
        device: torch.device,
        *,
        source: int | None = None,
        moves: bool = False,
    ) -> None:
        self.count, self.parts, self._algorithm = count, parts, algorithm
        self.layers = [
            PlacedLayer(row, Dispatch(self._table(row).to(device), len(row), moves, source)) for row in placement
        ]
        self.taken = 0

    def take(self) -> PlacedLayer:
        """The next layer's. Raises ConfigError if all are taken."""
        self.taken += 1
        if self.taken > len(self.layers):
            raise ConfigError("a model with more layers of experts than its config says cannot have redundant experts")
        return self.layers[self.taken - 1]

    def place(self, layer: PlacedLayer, placement: Placement) -> None:
        """Dispatch to the experts of ``placement`` [places] from the next pass on."""
        layer.placement = placement
        layer.dispatch.table.copy_(self._table(placement))

    def _table(self, row: Placement) -> Tensor:
        return torch.from_numpy(dispatch_table(row, self.count, self.parts, self._algorithm))
