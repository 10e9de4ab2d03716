"""Mixture-of-experts layers by the NPU's grouped matrix products: one operator sorts tokens by expert, another
multiplies those of all experts. The host reads nothing, so graphs can capture it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch_npu
from torch import Tensor

from kernels.core.operators import Linear
from kernels.devices.experts import (
    EPSILON,
    ClampedGate,
    Communicator,
    ExpertInputs,
    ExpertLayers,
    Experts,
    ExpertWeights,
    Routing,
    StackedExperts,
    choose,
    unbiased_refusal,
)
from kernels.devices.fallbacks import Fallbacks
from kernels.devices.linear import LinearLayers
from kernels.devices.npu.expert_exchange import exchange_algorithm, exchange_limit
from kernels.devices.npu.microscaling import mx_fits, mx_scales, round_mx
from kernels.devices.npu.operators import FRACTAL_NZ
from kernels.devices.npu.soc import Soc
from kernels.weights.quantization.weights import Fp8Weight, GroupedWeight, Int8Weight, Projection, QuantizedWeight

__all__ = ["NpuExpertLayers", "NpuExperts"]

_MAX_DIM = 65535
"""The largest dimension of npu_grouped_matmul."""
_MAX_EXPERTS = 2048
"""The most experts of npu_moe_gating_top_k."""
_HALVES = (torch.bfloat16, torch.float16)
_TILE = {2: (16, 16), 1: (16, 32)}
"""Tile sizes by bytes of an element."""
_GROUPS = 32
"""Divisors of valid group sizes."""


@dataclass(frozen=True)
class _Stack:
    """The weights of all experts. ``values`` [experts, inputs, outputs] in floats, int8 or e4m3, or eight 4-bit values
    an int32 along the outputs. ``scales`` f32 [experts, outputs]: for int8 by int8. ``powers``: for e4m3 by e4m3, bytes
    of e8m0 [experts, inputs / 64, outputs, 2]. ``factors``: scales of integer weights with floating inputs, applied
    after adding ``offsets``: [experts, outputs], or with groups [experts, groups, outputs], in the inputs' dtype.
    ``dtype``: of the outputs.
    """

    values: Tensor
    scales: Tensor | None = None
    powers: Tensor | None = None
    factors: Tensor | None = None
    offsets: Tensor | None = None
    before: ExpertInputs | None = None
    dtype: torch.dtype = torch.bfloat16

    def with_output_scales(self) -> _Stack:
        """The same with ``scales`` as npu_grouped_matmul takes them: of A2 and A3 in bfloat16 if the output is."""
        if self.scales is None or self.dtype != torch.bfloat16:
            return self
        return dataclasses.replace(self, scales=self.scales.to(self.dtype))


class NpuExperts(StackedExperts[_Stack]):
    """MoE layers in 16-bit floats, in int8 with per-token quantized activations, in MXFP8 if the device supports it, or
    weight-only in 4 bits (grouped or not) or 8.

    Weights are [experts, inputs, outputs]; those of floats and of int8 by int8 are in NZ tiles if the device keeps
    them, others in rows. Experts that move between ranks are in rows, since tiles can be neither sliced nor overwritten
    in part.
    """

    def __init__(
        self,
        router: Callable[[Tensor], Tensor],
        experts: Sequence[ExpertWeights],
        routing: Routing,
        soc: Soc,
        gate: Linear | None = None,
    ) -> None:
        self._gate = gate
        self._biases = (
            _stacked([expert.gate_up_bias for expert in experts]),
            _stacked([expert.down_bias for expert in experts]),
        )
        self._soc = soc
        self._bias = routing.correction if _is_biased_sigmoid(routing) else None
        super().__init__(router, experts, routing)
        gate_up = self.gate_up
        self._fused = (
            soc.fuses_experts
            and gate is None
            and self._biases == (None, None)
            and gate_up.scales is not None
            and self.down.scales is not None
            and self.down.before is None
            and self._fits_tiles(gate_up.values)
        )
        """Whether one operator multiplies with gate and up, activates and quantizes."""
        if not self._fused:
            self.gate_up = gate_up.with_output_scales()
        self.down = self.down.with_output_scales()

    @staticmethod
    def kind(weight: Tensor | QuantizedWeight, soc: Soc) -> tuple[object, ...] | None:
        """The kind that all experts of a layer must share; None if the operators of ``soc`` do not take the weight."""
        if max(weight.shape) > _MAX_DIM or weight.dtype not in _HALVES:
            return None
        if isinstance(weight, Tensor):
            return (Tensor,)
        clipped = weight.clip is not None
        if isinstance(weight, Int8Weight):
            return (Int8Weight, weight.activation, clipped) if weight.activation in ("dynamic", None) else None
        if isinstance(weight, Fp8Weight):
            return (Fp8Weight, clipped) if mx_fits(weight, soc) else None
        if isinstance(weight, GroupedWeight):
            apart = weight.group < weight.shape[1]
            groups = weight.bits == 4 and weight.group % _GROUPS == 0
            fits = (weight.bits == 8 or weight.shape[0] % 8 == 0) and (not apart or groups)
            form = weight.bits, weight.group if apart else None, weight.order is None, weight.activation
            return (GroupedWeight, *form, clipped) if fits else None
        return None

    def stack(self, weights: Sequence[Projection]) -> _Stack:
        before = ExpertInputs.from_weights(weights)
        floats = [weight for weight in weights if isinstance(weight, Tensor)]
        if floats:
            return _Stack(self._tiles(torch.stack([weight.t() for weight in floats])))
        whole = [weight for weight in weights if isinstance(weight, Int8Weight)]
        if whole:
            values = torch.stack([weight.values.t() for weight in whole])
            scales = torch.stack([weight.scales for weight in whole])
            if whole[0].activation is not None:
                return _Stack(self._tiles(values), scales.float(), before=before, dtype=whole[0].dtype)
            factors = scales.to(whole[0].dtype)
            return _Stack(values, None, None, factors, torch.zeros_like(factors), before)
        eighths = [weight for weight in weights if isinstance(weight, Fp8Weight)]
        if eighths:
            values = torch.stack([weight.values.view(torch.uint8) for weight in eighths]).view(torch.float8_e4m3fn)
            powers = torch.stack([mx_scales(weight) for weight in eighths])
            return _Stack(values.transpose(1, 2), None, powers.transpose(1, 2), before=before)
        return _stack_of_groups([weight for weight in weights if isinstance(weight, GroupedWeight)], before)

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """As ``choose``, with experts in int32, and weights that may be in the logits' dtype."""
        routing = self.routing
        if routing.is_plain:
            weights, experts, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(
                logits, k=routing.chosen, renorm=int(routing.normalized)
            )
            return weights, experts
        if self._bias is not None:
            weights, experts, _ = torch_npu.npu_moe_gating_top_k(
                logits.float(),
                routing.chosen,
                bias=self._bias,
                k_group=routing.top_groups,
                group_count=routing.groups,
                group_select_mode=int(routing.pair_sum),
                norm_type=1,  # sigmoid
                routed_scaling_factor=routing.scale,
                eps=EPSILON,
            )
            return weights, experts
        weights, experts = choose(logits, routing)
        return weights, experts.to(torch.int32)

    def choose(self, x: Tensor) -> Tensor:
        return self._choose(self.router(x))[1]

    def weights(self, number: int) -> list[Tensor]:
        result = [*self._biases]
        for stack in (self.gate_up, self.down):
            result += [stack.values, stack.scales, stack.powers, stack.factors, stack.offsets]
            if stack.before is not None:
                result += [stack.before.orders, stack.before.clips]
        return [tensor[number] for tensor in result if tensor is not None]

    def _fits_tiles(self, values: Tensor) -> bool:
        """Whether the device keeps [experts, inputs, outputs] in the cube unit's tiles: they divide it, and nothing is
        written to it later."""
        dispatch = self.routing.dispatch
        if dispatch is not None and dispatch.moves:
            return False
        rows, columns = _TILE[values.itemsize]
        return self._soc.nz_weights and values.shape[1] % rows == 0 and values.shape[2] % columns == 0

    def _tiles(self, values: Tensor) -> Tensor:
        """[experts, inputs, outputs] in the cube unit's tiles where they fit."""
        return torch_npu.npu_format_cast(values, FRACTAL_NZ) if self._fits_tiles(values) else values

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, experts = self._choose(logits)
        dispatch = self.routing.dispatch
        if dispatch is None:
            return self._run(x, weights, experts, logits.shape[1])
        return self._run(x, weights, dispatch(experts), dispatch.places)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, experts = self._choose(self.router(x))
        return weights, experts if self.routing.dispatch is None else self.routing.dispatch(experts)

    def run_places(self, x: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        return self._run(x, weights, places, self.count * self.routing.parts)

    def _run(self, x: Tensor, weights: Tensor, experts: Tensor, total: int) -> Tensor:
        """``experts`` int32: the places, of ``total``, that each token takes."""
        pairs, chosen, local = len(x), self.routing.chosen, self.routing.local or range(total)
        if self.routing.on_inputs:  # each pair is a token of its own
            x = (x.unsqueeze(1) * weights.unsqueeze(2).to(x.dtype)).flatten(0, 1)
            weights, experts = torch.ones_like(weights).view(-1, 1), experts.view(-1, 1)
        rounds = self.gate_up.scales is not None and self.gate_up.before is None
        rows, index, counts, scales = torch_npu.npu_moe_init_routing_v2(
            x.contiguous(),
            experts,
            active_num=pairs * chosen,
            expert_num=total,
            expert_tokens_num_type=1,  # counts
            expert_tokens_num_flag=True,
            quant_mode=1 if rounds else -1,
            active_expert_range=[local.start, local.stop],
        )
        stand = index
        if self.routing.local is not None:  # the index of pairs whose expert is elsewhere is -1
            here = index >= 0
            weights = weights * here.view(weights.shape)
            stand, index = torch.where(here, index, len(index)), index.clamp(min=0)
        owners, (first_bias, last_bias) = experts.flatten(), self._biases
        biased = first_bias is not None or last_bias is not None
        if biased or self.gate_up.before is not None or self.down.before is not None:
            owners = self._owners(owners, stand)
        if self.gate_up.before is not None:
            rows = self.gate_up.before(rows, owners)
        if not rounds:
            rows, scales = _rounded(rows, self.gate_up)
        out = self._products(rows, scales, counts, x.dtype, owners)
        if self.routing.local is not None:  # rows that no expert wrote may be NaN, and row 0 stands for those elsewhere
            out[:1].masked_fill_(counts.sum() == 0, 0.0)
        result: Tensor = torch_npu.npu_moe_finalize_routing(
            out, None, None, None, weights.to(x.dtype), index, experts, drop_pad_mode=2
        )
        return result.unflatten(0, (pairs, chosen)).sum(1) if self.routing.on_inputs else result

    def _products(
        self, rows: Tensor, scales: Tensor | None, counts: Tensor, dtype: torch.dtype, owners: Tensor | None = None
    ) -> Tensor:
        """The results of rows that are sorted by expert, with their ``owners``, which biases and steps on inputs read;
        rows and ``scales`` are rounded as the weights need it."""
        first_bias, last_bias = self._biases
        if self._fused:
            inner, scales = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
                rows, [self.gate_up.values], [self.gate_up.scales], scales, counts, group_list_type=1
            )
        else:
            both = _multiply(rows, scales, self.gate_up, counts, dtype)
            if first_bias is not None and owners is not None:
                both = both + first_bias.index_select(0, owners)
            inner = torch_npu.npu_swiglu(both) if self._gate is None else self._gate(both)
            if self.down.before is not None and owners is not None:
                inner = self.down.before(inner, owners)
            inner, scales = _rounded(inner, self.down)
        out = _multiply(inner, scales, self.down, counts, dtype)
        return out if last_bias is None or owners is None else out + last_bias.index_select(0, owners)

    def exchange_rows(self, ranks: int) -> int:
        plain = self._biases == (None, None) and self.gate_up.before is None and self.down.before is None
        if not plain or not self._soc.exchanges_experts or self.routing.on_inputs:
            return 0
        return exchange_limit(
            self._soc.generation, self.gate_up.values.shape[1], self.count, self.routing.chosen, ranks
        )

    def run_exchanged(
        self, x: Tensor, weights: Tensor, places: Tensor, mask: Tensor, communicator: Communicator
    ) -> Tensor:
        alike = {"x_active_mask": mask, "shared_expert_num": 0, "comm_alg": exchange_algorithm(self._soc.generation)}
        group = communicator.name, communicator.size, communicator.rank, self.count * communicator.size
        rounds = self.gate_up.scales is not None
        rows, scales, assist, counts, received, _, _ = torch_npu.npu_moe_distribute_dispatch_v2(
            x, places, *group, quant_mode=2 if rounds else 0, expert_token_nums_type=1, **alike
        )
        if not rounds:
            rows, scales = _rounded(rows, self.gate_up)
        out = self._products(rows, scales, counts, x.dtype)
        result: Tensor = torch_npu.npu_moe_distribute_combine_v2(
            out, places, assist, received, weights, *group, **alike
        )
        return result

    def _owners(self, experts: Tensor, places: Tensor) -> Tensor:
        """The expert here of each row, from ``experts`` of the pairs [pairs] and the ``places`` of their rows."""
        if self.routing.local is None:
            return torch.empty_like(experts).index_copy_(0, places.long(), experts)
        rows = experts.new_zeros(len(experts) + 1).index_copy_(0, places.long(), experts - self.routing.local.start)
        return rows[:-1].clamp(0, self.count - 1)


def _stacked(biases: Sequence[Tensor | None]) -> Tensor | None:
    """[experts, outputs]; None if there are none."""
    some = [bias for bias in biases if bias is not None]
    return torch.stack(some) if some else None


def _is_biased_sigmoid(routing: Routing) -> bool:
    """Whether npu_moe_gating_top_k takes the routing. Its documents for A2 and A3 have a bias; a sigmoid's weights are
    always divided by their sum."""
    if routing.correction is None:
        return False
    count = len(routing.correction)
    grouped = routing.groups == 1 or count // routing.groups > 2
    return routing.scores == "sigmoid" and routing.normalized and grouped and count <= _MAX_EXPERTS


def _rounded(rows: Tensor, weight: _Stack) -> tuple[Tensor, Tensor | None]:
    """Quantize ``rows`` [tokens, inputs] as ``weight`` requires; returns them and their scales, if any."""
    if weight.powers is not None:
        return round_mx(rows)
    if weight.scales is None:
        return rows, None
    whole, scales = torch_npu.npu_dynamic_quant(rows)
    return whole, scales


def _multiply(rows: Tensor, scales: Tensor | None, weight: _Stack, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply ``rows`` [tokens, inputs], sorted by expert; each expert has ``counts`` int64 [experts] rows."""
    more: dict[str, object] = {}
    if weight.scales is not None:
        more = {"scale": [weight.scales], "per_token_scale": [scales], "output_dtype": dtype}
    if weight.powers is not None:
        more = {"scale": [weight.powers], "per_token_scale": [scales], "output_dtype": dtype}
        more |= dict.fromkeys(("scale_dtype", "per_token_scale_dtype"), torch_npu.float8_e8m0fnu)
    if weight.factors is not None:
        more = {"antiquant_scale": [weight.factors], "antiquant_offset": [weight.offsets]}
    result: Tensor = torch_npu.npu_grouped_matmul(
        [rows], [weight.values], split_item=2, group_type=0, group_list=counts, group_list_type=1, **more
    )[0]
    return result


def _stack_of_groups(weights: Sequence[GroupedWeight], before: ExpertInputs | None) -> _Stack:
    values, factors, offsets = [], [], []
    for weight in weights:
        middle = 1 << (weight.bits - 1)
        whole = (weight.unpacked().to(torch.int32) - middle).t().contiguous()
        packs = weight.bits == 4
        values.append(torch_npu.npu_convert_weight_to_int4pack(whole) if packs else whole.to(torch.int8))
        factor = weight.scales.t().to(weight.dtype)
        offset = torch.zeros_like(factor)
        if weight.zeros is not None:
            offset = middle - weight.zeros.t().to(weight.dtype)
        apart = weight.group < weight.shape[1]
        factors.append(factor if apart else factor[0])
        offsets.append(offset if apart else offset[0])
    return _Stack(torch.stack(values), None, None, torch.stack(factors), torch.stack(offsets), before)


def _stored(experts: Sequence[ExpertWeights]) -> list[list[Tensor]]:
    """What the linear layers of each expert read; empty unless all is float32, which they keep as it is."""
    result = []
    for expert in experts:
        parts = [expert.gate_up, expert.gate_up_bias, expert.down, expert.down_bias]
        floats = [part for part in parts if isinstance(part, Tensor) and part.dtype == torch.float32]
        if len(floats) < sum(part is not None for part in parts):
            return []
        result.append(floats)
    return result


class NpuExpertLayers(ExpertLayers):
    def __init__(self, linear: LinearLayers, fallbacks: Fallbacks, soc: Soc) -> None:
        super().__init__(linear, fallbacks)
        self.soc = soc

    def make(
        self,
        router: Tensor,
        bias: Tensor | None,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: ClampedGate | None = None,
    ) -> Experts:
        return self.make_routed(self.make_router(router, bias, routing, shared=True), experts, routing, gate)

    def make_routed(
        self,
        router: Linear,
        experts: Sequence[ExpertWeights],
        routing: Routing,
        gate: Linear | None = None,
        *,
        identities: int = 0,
    ) -> Experts:
        kind = partial(NpuExperts.kind, soc=self.soc)
        experts = self.stackable(experts, kind)
        reason = "some return their input" if identities else unbiased_refusal(experts, kind)
        if reason is not None:
            in_turn = self.make_in_turn(router, experts, routing, reason, gate, identities=identities)
            in_turn.stored = _stored(experts)
            return in_turn
        return NpuExperts(router, experts, routing, self.soc, gate)
