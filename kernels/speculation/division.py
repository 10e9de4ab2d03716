"""How ranks divide a draft model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import ConfigError
from kernels.distributed.draft_experts import DraftExperts
from kernels.distributed.group import Group
from kernels.distributed.shared_experts import SharedExperts
from kernels.models.config import ModelConfig, local_config
from kernels.weights.tensors import Shard, TensorSpec

__all__ = ["DraftDivision", "divide_draft"]


@dataclass(frozen=True)
class DraftDivision:
    """``local``: the sizes of this rank's part. ``shard``: which part. ``ep_size`` and ``shared``: as in
    ``LayerBuilder``."""

    local: ModelConfig
    shard: Shard
    ep_size: int = 1
    shared: SharedExperts | None = None


def divide_draft(
    config: RunnerConfig, group: Group, shared: DraftExperts | None, whole: ModelConfig, declared: Iterable[TensorSpec]
) -> DraftDivision:
    """The division of a draft ``whole`` with the ``declared`` tensors over the ranks of ``group``.

    Experts are divided as the target's (``RunnerConfig.ep_size``) where their number and the family allow it, otherwise
    by their inner dimension. With ``shared`` all ranks of data-parallel attention divide them. Raises ConfigError.
    """
    experts, size = whole.experts, config.tp_size
    placed = experts is not None and not experts.identities and any(spec.is_placed for spec in declared)
    if shared is not None:
        if not placed or experts is None or experts.count % size:
            found = "no experts that devices could divide" if experts is None or not placed else f"{experts.count}"
            raise ConfigError(
                f"--speculative-moe-a2a-backend divides the experts of the draft over {size} devices, and it has "
                f"{found}; leave it out"
            )
        shared.set_width(whole.hidden_size)
        local = local_config(whole, group.size, config.dp_size, size, routed_alone=True)
        shard = Shard(group.rank, group.size, Shard(config.tp_rank, size, ep_size=size), size, True)
        return DraftDivision(local, shard, size, shared)
    parts = config.ep_size
    if config.dp_size > 1 or not placed or experts is None or experts.count % parts:
        parts = 1
    if experts is not None and experts.inner % (group.size // parts):
        parts = 1  # it names the numbers that do not divide
    return DraftDivision(local_config(whole, group.size, 1, parts), Shard(group.rank, group.size, None, parts), parts)
