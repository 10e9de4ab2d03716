"""Experts that a checkpoint keeps in one tensor a layer, as transformers has them in memory, by the names of each one.

``experts.gate_up_proj`` [experts, 2 * inner, hidden] is gate's, then up's; ``experts.down_proj`` [experts, hidden,
inner]. Mixtral's checkpoints call the block and its projections otherwise than transformers does in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.models.config import MOST_EXPERTS
from kernels.parallel.partition import Part

__all__ = ["MIXTRAL", "Piece", "mixtral_name", "pieces"]

MIXTRAL = "block_sparse_moe"
_PLAIN = ".mlp."


@dataclass(frozen=True)
class Piece:
    """Rows ``begin`` to ``end`` of an expert in the tensor ``stored``; it has ``columns``."""

    stored: str
    expert: int
    begin: int
    end: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.end - self.begin, self.columns

    def index(self, part: Part | None) -> tuple[slice, slice, slice]:
        """Of all of it, or of a part, with a dimension of one in front."""
        rows, columns = slice(self.begin, self.end), slice(None)
        if part is not None and part.dimension == 0:
            rows = slice(self.begin + part.begin, self.begin + part.end)
        elif part is not None:
            columns = slice(part.begin, part.end)
        return slice(self.expert, self.expert + 1), rows, columns


def mixtral_name(name: str) -> str:
    """What Mixtral's checkpoints call a tensor's block."""
    return name.replace(_PLAIN, f".{MIXTRAL}.")


def pieces(name: str, shape: tuple[int, ...], mixtral: bool = False) -> dict[str, Piece]:
    """The weights that a tensor holds, by the names that each would have alone, of a Qwen2-MoE or a Qwen3-MoE, or of a
    ``mixtral``; empty when it holds no experts, or more than any model has."""
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    block, _, kind = name.rpartition(".")
    if not block.endswith(".experts") or len(shape) != 3:
        return {}
    count, rows, columns = shape
    # A header of a tensor without elements may name any number of them.
    if not 0 < count <= MOST_EXPERTS or not rows or not columns:
        return {}
    own = mixtral_name(block) if mixtral else block
    if kind == "down_proj":
        return {f"{own}.{e}.{down}.weight": Piece(name, e, 0, rows, columns) for e in range(count)}
    if kind != "gate_up_proj" or rows % 2:
        return {}
    found = {}
    for e in range(count):
        found[f"{own}.{e}.{gate}.weight"] = Piece(name, e, 0, rows // 2, columns)
        found[f"{own}.{e}.{up}.weight"] = Piece(name, e, rows // 2, rows, columns)
    return found
