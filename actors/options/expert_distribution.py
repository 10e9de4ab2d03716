"""The arguments of the recorder of expert distribution."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.declaration import ArgumentSpec
from actors.options.parallelism import ParallelismArguments

__all__ = ["ExpertDistributionArguments"]


class ExpertDistributionArguments(ParallelismArguments, frozen=True, kw_only=True):
    """The arguments of the recorder of expert distribution."""

    expert_distribution_recorder_mode: Annotated[
        Literal["stat", "stat_approx", "per_pass", "per_token"] | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="none",
            help="What POST /start_expert_distribution_record records: the tokens that each expert takes in all steps "
            "(stat), in one step of 8 (stat_approx), in each step apart (per_pass), or the experts of each token "
            "(per_token). While it records, steps are neither captured nor run as a program; of stat_approx only "
            "the counted ones.",
        ),
    ] = None

    expert_distribution_recorder_buffer_size: Annotated[
        int | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="1000",
            minimum=1,
            maximum=10**7,
            also=(-1,),
            metavar="STEPS",
            help="Number of steps that a record holds: the last ones, and at most 256 MiB of them. -1: all since its "
            "start; of stat and stat_approx then only the sums are held.",
        ),
    ] = None

    expert_distribution_recorder_dir: Annotated[
        str | None,
        ArgumentSpec(
            group="Devices and kernels",
            default_text="the folder for temporary files",
            metavar="DIR",
            help="Folder of the JSON files that POST /dump_expert_distribution_record writes; the answer names the "
            "file. SGLang names it SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR.",
        ),
    ] = None

    enable_expert_distribution_metrics: Annotated[
        bool,
        ArgumentSpec(
            group="Devices and kernels",
            help="Export metrics of what --expert-distribution-recorder-mode records: how evenly the tokens of each "
            "layer are divided over its experts.",
        ),
    ] = False
