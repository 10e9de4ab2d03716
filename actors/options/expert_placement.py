"""The arguments of expert placement and its load balancer (EPLB)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from actors.options.declaration import ArgumentSpec
from actors.options.expert_distribution import ExpertDistributionArguments

__all__ = ["ExpertPlacementArguments"]


class ExpertPlacementArguments(ExpertDistributionArguments, frozen=True, kw_only=True):
    """The arguments of expert placement and its load balancer (EPLB)."""

    ep_num_redundant_experts: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            aliases=("num-redundant-experts",),
            minimum=0,
            maximum=1024,
            metavar="N",
            help="Number of redundant experts in each MoE layer: copies of experts that receive many tokens. Experts "
            "and copies together must be divisible by --expert-parallel-size.",
        ),
    ] = 0

    ep_dispatch_algorithm: Annotated[
        Literal["static", "dynamic"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="static",
            help="How a token chooses among the copies of an expert. static: a fixed copy for each source rank, its "
            "own if it has one; row r of a step counts as one of rank r modulo --expert-parallel-size. dynamic: an "
            "even split over all copies.",
            unbuilt_choices={"fake": "it gives tokens random experts, so that answers are wrong"},
        ),
    ] = None

    init_expert_location: Annotated[
        str,
        ArgumentSpec(
            group="Devices and kernels",
            metavar="LOCATION",
            help="Initial placement of experts: trivial (in order), a JSON object, or the path of a JSON file. "
            "physical_to_logical_map lists, for each layer, the logical expert of each physical expert; logical_count "
            "lists the tokens of each expert, as POST /dump_expert_distribution_record writes them. Pickled .pt files "
            "are refused.",
        ),
    ] = "trivial"

    enable_eplb: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Expert parallelism load balancer: move experts between devices while the model runs, by the tokens "
            "that each receives. One step in 16 counts them, without a captured graph. A "
            "restarted worker begins with the placement of --init-expert-location.",
        ),
    ] = False

    eplb_config: Annotated[
        dict[str, Any],
        ArgumentSpec(
            group="Devices and kernels",
            metavar="JSON",
            help="Arguments of --enable-eplb as vLLM's JSON object: num_redundant_experts "
            "(--ep-num-redundant-experts) and step_interval (--eplb-rebalance-num-iterations).",
        ),
    ] = msgspec.field(default_factory=dict)

    eplb_algorithm: Annotated[
        Literal["auto", "deepseek"],
        ArgumentSpec(
            group="Devices and kernels",
            help="How --enable-eplb places experts: the most loaded get the copies, then all are packed so that "
            "devices have equal loads (deepseek). auto: the same.",
            unbuilt_choices={
                "deepseek_hierarchical": "all devices have all tokens, so keeping a group of experts on one node "
                "saves no traffic; use deepseek",
                "elasticity_aware": "the devices of a model do not change while it runs; use deepseek",
            },
        ),
    ] = "auto"

    eplb_rebalance_num_iterations: Annotated[
        int,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=1,
            maximum=10**9,
            metavar="STEPS",
            help="Steps between two rebalances of --enable-eplb; their tokens decide the new placement.",
        ),
    ] = 1000

    eplb_rebalance_layers_per_chunk: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="1",
            minimum=1,
            maximum=10**6,
            metavar="LAYERS",
            help="Number of layers whose experts --enable-eplb moves together during a rebalance. If a device sends or "
            "receives more than 64 MiB (CPU: 8 MiB) for them, the moves are divided over several steps.",
        ),
    ] = None

    eplb_min_rebalancing_utilization_threshold: Annotated[
        float,
        ArgumentSpec(
            group="Devices and kernels",
            minimum=0,
            maximum=1,
            metavar="SHARE",
            help="--enable-eplb skips a rebalance if utilization is above this. Utilization: the mean of the devices' "
            "tokens divided by their maximum, averaged over layers. 1: it never skips.",
        ),
    ] = 1.0
