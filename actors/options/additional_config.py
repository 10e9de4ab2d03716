"""``--additional-config``: vLLM-Ascend's JSON object, and ``--eplb-config``: vLLM's of the load balancer of experts.

Members that are arguments here become these. The others are accepted with the value that holds anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from actors.options.errors import ArgumentError

__all__ = ["split_additional_config", "split_eplb_config"]

_ARGUMENTS = {
    "enable_dsa_cp": "enable-nsa-prefill-context-parallel",
    "multistream_overlap_shared_expert": "enable-single-batch-overlap",
    "eplb_config.dynamic_eplb": "enable-eplb",
    "eplb_config.num_redundant_experts": "ep-num-redundant-experts",
    "eplb_config.expert_heat_collection_interval": "eplb-rebalance-num-iterations",
}
_ALWAYS: dict[str, object] = {
    "enable_weight_nz_layout": True,
    "weight_nz_mode": 2,
    "enable_mlapo": True,
    "ascend_compilation_config.fuse_norm_quant": True,
    "ascend_fusion_config.fusion_ops_gmmswigluquant": True,
    "pa_shape_list": [],
    "eplb_config.eplb_policy_type": 1,
}
"""Members and the value that always holds. Of all others it is false, 0 or null."""

_CHOSEN = "the device chooses kernels, layouts and streams; leave it out"
_REASONS = {
    "enable_weight_nz_layout": "weights are kept in the cube unit's tiles wherever they fit; leave it out",
    "weight_nz_mode": "weights are kept in the cube unit's tiles wherever they fit, which is mode 2; leave it out",
    "enable_cpu_binding": "workers are bound to no cores; leave it out, and use numactl",
    "recompute_scheduler_enable": "prefill-decode disaggregation, which needs it, is not built yet; leave it out",
    "enable_shared_expert_dp": "leave it out; with --enable-dp-attention and --moe-a2a-backend deepep each device has "
    "the whole shared expert",
    "enable_balance_scheduling": "leave it out; --load-balance-method chooses the replica of a request",
    "enable_flashcomm1": "leave it out; --enable-two-batch-overlap hides the sums over devices",
    "enable_sparse_li_c8": "the cache of indexers has 16 bits; leave it out",
    "enable_sparse_sfa_c8": "the cache of sparse attention has 16 bits; leave it out",
    "c8_enable_reshape_optim": "the cache of indexers has 16 bits; leave it out",
    "enable_fused_mc2": "torch_npu has no operator that dispatches tokens, runs their experts and combines; leave it "
    "out, or give --moe-a2a-backend deepep",
    "enable_reduce_sample": "logits are gathered before sampling; leave it out",
    "ascend_compilation_config": "compiling the model is not built; leave it out: decodes are graphs of whole steps",
    "ascend_fusion_config": "fused operators are used wherever they fit; leave it out",
    "torchair_graph_config": "compiling the model is not built; leave it out: decodes are graphs of whole steps",
    "xlite_graph_config": "compiling the model is not built; leave it out: decodes are graphs of whole steps",
    "ascend_scheduler_config": "there is one scheduler; leave it out, or give --chunked-prefill-size -1 for whole "
    "prompts",
    "finegrained_tp_config": "the sizes of parts follow from --tensor-parallel-size; leave it out, or see "
    "--moe-dense-tp-size and --enable-dp-lm-head",
    "scheduler_config": "there is one scheduler; leave it out, or see --schedule-policy and --chunked-prefill-size",
    "short_request_first_config": "there is one scheduler; leave it out, or see --schedule-policy",
    "profiling_chunk_config": "chunks have equal sizes; leave it out, and set --chunked-prefill-size",
    "rl_config": "bitwise equality with a trainer is not built yet; leave it out, or give "
    "--enable-deterministic-inference",
    "rejection_sampler_config": "leave it out; --speculative-accept-threshold-single accepts more draft tokens",
    "dynamic_spec_config": "leave it out; --speculative-adaptive drafts less when drafting does not pay",
    "dump_config": "dumping tensors is not built yet; leave it out",
    "dump_config_path": "dumping tensors is not built yet; leave it out",
    "msmonitor_use_daemon": "profiling by requests is not built; leave it out, and use msprof",
    "weight_prefetch_config": _CHOSEN,
    "eplb_config.eplb_policy_type": "experts are placed by policy 1; leave it out",
    "eplb_config": "leave it out; see --enable-eplb, --init-expert-location and --expert-distribution-recorder-mode",
    "chunked_prefill_for_mla": "prompts are always run in chunks; leave it out",
    "refresh": "the configuration is read once; leave it out",
} | dict.fromkeys(
    (
        *("enable_kv_nz", "enable_mlapo", "pa_shape_list", "multistream_dsv4_dsa_overlap", "enable_prefill_mc2"),
        *("enable_mc2_hierarchy_comm", "enable_transpose_kv_cache_by_block", "enable_prefill_optimizations"),
        *("multistream_overlap_gate", "mega_moe_max_tokens", "enable_flashcomm"),
    ),
    _CHOSEN,
)
"""Why a member, or the members of an object, are refused with another value."""

_OF_EPLB = {"num_redundant_experts": "ep-num-redundant-experts", "step_interval": "eplb-rebalance-num-iterations"}
_EPLB_REASONS = {
    "window_size": "the tokens of all steps since the last rebalance count; leave it out",
    "use_async": "experts always move while steps run; leave it out or give true",
    "log_balancedness": "leave it out; --enable-expert-distribution-metrics reports the balance",
    "log_balancedness_interval": "leave it out; --enable-expert-distribution-metrics reports the balance",
    "policy": "experts are placed by one policy; leave it out or give default",
    "communicator": "experts move by torch.distributed; leave it out",
}
_EPLB_ALWAYS: dict[str, object] = {"use_async": True, "policy": "default"}


def split_additional_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """The member, such as ``eplb_config.dynamic_eplb``, the argument's name and its value, where it is an argument.

    Raises ArgumentError with every member that is unknown or asks for something else.
    """
    problems: list[str] = []
    for member, value in (each for key, whole in config.items() for each in _members(key, whole)):
        if member in _ARGUMENTS:
            yield member, _ARGUMENTS[member], value
            continue
        name = member.removeprefix("scheduler_config.")
        reason = _REASONS.get(name) or _REASONS.get(name.partition(".")[0]) or _REASONS.get(member.partition(".")[0])
        if reason is None:
            problems.append(f"{member[:64]}: there is no such member")
        elif not _holds(_ALWAYS.get(name), value):
            problems.append(f"{member[:64]}: {reason}")
    if problems:
        raise ArgumentError(problems)


def split_eplb_config(config: Mapping[str, Any]) -> Iterator[tuple[str, str, object]]:
    """As ``split_additional_config``."""
    problems: list[str] = []
    for key, value in config.items():
        if key in _OF_EPLB:
            yield key, _OF_EPLB[key], value
        elif key not in _EPLB_REASONS:
            known = ", ".join((*_OF_EPLB, *_EPLB_REASONS))
            problems.append(f"{key[:64]}: there is no such member; known are {known}")
        elif not _holds(_EPLB_ALWAYS.get(key), value):
            problems.append(f"{key}: {_EPLB_REASONS[key]}")
    if problems:
        raise ArgumentError(problems)


def _members(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Objects in ``value`` are taken apart: ``eplb_config.dynamic_eplb``."""
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, part in value.items():
        yield from _members(f"{name}.{key}", part)


def _holds(always: object, value: object) -> bool:
    """Whether a value changes nothing. ``always``: the value that holds; None: false, 0 or an empty one."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    return value is None or (not value if always is None else value == always)
