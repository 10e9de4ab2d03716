"""The overloads of both versions of fused inference attention: plain, .out, workspace, output shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.devices.npu_simulator.constraints import ConstraintError, contiguous, require
from kernels.devices.npu_simulator.fused_attention import Attention
from kernels.devices.npu_simulator.operators.reference import reference

__all__: list[str] = []

V1 = "npu_fused_infer_attention_score"
V2 = "npu_fused_infer_attention_score_v2"

DEFAULTS_V1 = {
    "atten_mask": None,
    "actual_seq_lengths": None,
    "actual_seq_lengths_kv": None,
    "block_table": None,
    "num_heads": 1,
    "scale": 1.0,
    "pre_tokens": 2147483647,
    "next_tokens": 2147483647,
    "input_layout": "BSH",
    "num_key_value_heads": 0,
    "sparse_mode": 0,
    "inner_precise": 0,
    "block_size": 0,
    "softmax_lse_flag": False,
    "key_antiquant_scale": None,
    "value_antiquant_scale": None,
    "key_antiquant_mode": 0,
    "value_antiquant_mode": 0,
    "query_rope": None,
    "key_rope": None,
}
IGNORED = frozenset({"workspace", "out"})
SECOND_NAMES = {
    "actual_seq_qlen": "actual_seq_lengths",
    "actual_seq_kvlen": "actual_seq_lengths_kv",
    "num_query_heads": "num_heads",
    "softmax_scale": "scale",
    "return_softmax_lse": "softmax_lse_flag",
}


def attention(operator: str, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Attention:
    """A call of either version. Arguments that are not simulated raise."""
    given = {SECOND_NAMES.get(name, name): option for name, option in options.items()}
    sink = given.pop("learnable_sink", None)
    for name in list(given):
        if name not in DEFAULTS_V1:
            option = given.pop(name)
            if name not in IGNORED and (isinstance(option, Tensor) or option not in (None, 0)):
                raise ConstraintError(operator, name, "is not simulated: leave it out")
    chosen = DEFAULTS_V1 | given
    heads = chosen["num_heads"]
    return Attention(
        operator=operator,
        query=query,
        key=key,
        value=value,
        mask=chosen["atten_mask"],
        lengths=chosen["actual_seq_lengths"],
        kv_lengths=chosen["actual_seq_lengths_kv"],
        blocks=chosen["block_table"],
        sink=sink,
        heads=heads,
        kv_heads=chosen["num_key_value_heads"] or heads,
        scale=chosen["scale"],
        before=chosen["pre_tokens"],
        after=chosen["next_tokens"],
        layout=chosen["input_layout"],
        sparse=chosen["sparse_mode"],
        precise=chosen["inner_precise"],
        block_size=chosen["block_size"],
        lse=chosen["softmax_lse_flag"],
        key_scale=chosen["key_antiquant_scale"],
        value_scale=chosen["value_antiquant_scale"],
        modes=(chosen["key_antiquant_mode"], chosen["value_antiquant_mode"]),
        query_rope=chosen["query_rope"],
        key_rope=chosen["key_rope"],
    )


def enter(operator: str) -> None:
    """The four overloads of one version."""

    def rules(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        attention(operator, query, key, value, options).check()

    def default(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return attention(operator, query, key, value, options).compute()

    def out_rules(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> None:
        rules(query, key, value, **options)
        outputs = options["out"]
        require(len(outputs) == 2, operator, "out", f"needs [output, log sums], has {len(outputs)} tensors")
        contiguous(operator, **{"out[0]": outputs[0]})
        need = 0 if options.get("workspace") is None else options["workspace"].numel()
        wanted = workspace_bytes(query, attention(operator, query, key, value, options))
        require(
            options.get("workspace") is None or need * options["workspace"].element_size() >= wanted,
            *(
                operator,
                "workspace",
                f"{need} elements are fewer than the {wanted} bytes that get_max_workspace asks for",
            ),
        )

    def out(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        result, lse = attention(operator, query, key, value, options).compute()
        outputs = options["out"]
        outputs[0].copy_(result.view(outputs[0].shape))
        if options.get("softmax_lse_flag") or options.get("return_softmax_lse"):
            outputs[1].copy_(lse)
        return tuple(outputs)

    def workspace(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return torch.empty(workspace_bytes(query, attention(operator, query, key, value, options)), dtype=torch.uint8)

    reference(operator, rules=rules)(default)
    reference(f"{operator}.out", rules=out_rules, like=operator)(out)
    reference(f"_{operator}_get_max_workspace", rules=rules, host=True)(workspace)
    infer_output(operator)


def workspace_bytes(query: Tensor, call: Attention) -> int:
    """A size that grows with the queries and not with the lengths, like the device's maximum. Any size would work."""
    return 4096 + 512 * call.heads * call.entries()


def infer_output(operator: str) -> None:
    def output(query: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        layout = options.get("input_layout", "BSH")
        lse = options.get("softmax_lse_flag") or options.get("return_softmax_lse")
        sums: tuple[int, ...] = (0,)
        if lse:
            heads = options.get("num_heads") or options.get("num_query_heads") or 1
            tokens = query.shape[2] if layout == "BNSD" else query.shape[1]
            sums = (query.shape[0], heads, 1) if layout == "TND" else (query.shape[0], heads, tokens, 1)
        shape = query.transpose(0, 1).shape if layout == "TND_NTD" else query.shape
        return query.new_empty(shape), torch.empty(sums, dtype=torch.float32)

    reference(f"_{operator}_infer_output", host=True)(output)


for version in (V1, V2):
    enter(version)
