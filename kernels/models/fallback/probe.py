"""Finds out what a model's layers cache, by one pass of its code without weights, on the meta device.

The pass shows every call of attention with its heads and its mask. A model is refused, with the reason, where our cache
could not hold what its layers keep: states of linear attention, positions that are part of the scores, other masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from kernels.models.fallback.attention import Call, MaskRule, Refused, running
from kernels.models.fallback.sizes import LayerCall

__all__ = ["Probed", "probe"]

_TOKENS = 12


@dataclass(frozen=True)
class Probed:
    """What a pass showed. ``base``: the path of the module that makes hidden states, which the head reads."""

    layers: tuple[LayerCall, ...]
    base: str
    hidden_size: int
    vocab_size: int


def probe(model: Any) -> Probed:
    """Run ``model``, which is on the meta device with the implementation ``PROBE``. Raises Refused."""
    name = type(model).__name__
    _check_modules(model, name)
    calls: list[tuple[Any, LayerCall]] = []
    entered: list[Any] = []
    outputs: dict[int, Any] = {}

    def run(call: Call) -> Tensor:
        calls.append((call.module, _checked(call, name)))
        tokens, heads, dim = call.queries.shape[2], call.queries.shape[1], call.values.shape[3]
        return call.queries.new_empty(1, tokens, heads, dim)

    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    positions = torch.arange(_TOKENS, device="meta")[None]
    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(lambda module, _: entered.append(module)))
        hooks.append(module.register_forward_hook(lambda module, _, output: outputs.update({id(module): output})))
    try:
        with torch.inference_mode(), running(run), _unpacked(), torch.device("meta"), _Meta():
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    except Refused as error:
        raise error if name in str(error) else Refused(f"{name} cannot be run: {error}") from error
    except Exception as error:
        raise Refused(
            f"transformers' code of {name} cannot be run without weights ({type(error).__name__}: {error})"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    _check_layers(model, name, [module for module, _ in calls])
    first = calls[0][0]
    base = next((module for module in entered[1:] if any(part is first for part in module.modules())), first)
    hidden = outputs[id(base)][0]
    if base is first or not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.shape[1] != _TOKENS:
        raise Refused(f"the part of {name} that makes hidden states was not found")
    path = next(path for path, module in model.named_modules() if module is base)
    return Probed(tuple(layer for _, layer in calls), path, hidden.shape[-1], logits.shape[-1])


@contextmanager
def _unpacked() -> Iterator[None]:
    """Positions of the probe are of one sequence; transformers would read their values to find that out."""
    result = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = result


def _check_modules(model: Any, name: str) -> None:
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise Refused(
            f"{name} takes no positions (position_ids), so that tokens of several sequences cannot run as one"
        )
    if getattr(model, "_is_stateful", False):
        raise Refused(f"layers of {name} keep states, not keys and values of tokens; it needs a family of its own")
    for path, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            raise Refused(f"{path} of {name} counts positions from those of padding")
        if isinstance(module, nn.Conv1d) and module.kernel_size != (1,):
            raise Refused(f"{path} of {name} is a convolution over tokens, whose state would have to be kept")


def _checked(call: Call, name: str) -> LayerCall:
    queries, keys, values = call.queries, call.keys, call.values
    if queries.shape[0] != 1 or queries.ndim != 4 or queries.shape[2] != _TOKENS:
        raise Refused(f"attention of {name} has queries of shape {list(queries.shape)}, not of all tokens")
    if keys.shape[2] != _TOKENS:
        raise Refused(f"attention of {name} reads {keys.shape[2]} keys for {_TOKENS} tokens")
    if queries.shape[1] % keys.shape[1] or keys.shape[1] != values.shape[1]:
        raise Refused(f"{queries.shape[1]} query heads of {name} do not share {keys.shape[1]} key heads evenly")
    if call.others:
        raise Refused(f"attention of {name} has arguments that are not supported: {', '.join(call.others)}")
    window = call.window
    if isinstance(call.mask, MaskRule):
        with torch.device("cpu"):
            seen = _window(call.mask, name)
        if window >= _LENGTH:
            seen = window if seen in (0, window) else -1
        if seen != window and window and seen:
            raise Refused(f"a layer of {name} has a window of {window} tokens and a mask of {seen}")
        window = window or seen
    elif call.mask is not None:
        raise Refused(f"attention of {name} has a mask of its own, such as a bias of positions")
    elif getattr(call.module, "is_causal", True) is False:
        raise Refused(f"attention of {name} is not causal")
    return LayerCall(
        queries.shape[1], keys.shape[1], keys.shape[3], values.shape[3], window, float(call.cap), call.sinks is not None
    )


_LENGTH = 1 << 20


def _window(rule: MaskRule, name: str) -> int:
    """The window of a mask, in tokens, 0 for all. Raises Refused for another pattern."""
    last, keys = torch.tensor([[_LENGTH - 1]]), torch.arange(_LENGTH)[None, :]
    window = int(rule.sees(last, keys).sum())
    near = torch.arange(min(4 * window, 256))
    steps = torch.cat((near, torch.arange(0, _LENGTH, _LENGTH // 16 + 1)))[:, None]
    keys = torch.cat((near, (steps - window).clamp(min=0)[:, 0], (steps - window + 1).clamp(min=0)[:, 0]))[None, :]
    past = steps - keys
    if not torch.equal(rule.sees(steps, keys), (past >= 0) & (past < window)):
        raise Refused(f"attention of {name} has a mask that is neither causal nor a sliding window")
    return window if window < _LENGTH else 0


def _check_layers(model: Any, name: str, modules: Sequence[Any]) -> None:
    """Every layer must attend: one that does not keeps something else."""
    if not modules:
        raise Refused(f"{name} computes attention without transformers' registry of implementations")
    attending = {id(module) for module in modules}
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) > 0]
    holding = [part for part in lists if any(_attends(layer, attending) for layer in part)]
    for part in holding:
        without = [index for index, layer in enumerate(part) if not _attends(layer, attending)]
        if without:
            raise Refused(f"layers {', '.join(map(str, without))} of {name} have no attention over cached keys")


def _attends(layer: nn.Module, attending: set[int]) -> bool:
    return any(id(module) in attending for module in layer.modules())


_VALUES = {
    "__contains__": False,
    "item": 0,
    "__bool__": False,
    "__int__": 0,
    "__float__": 0.0,
    "__index__": 0,
}


class _Meta(TorchFunctionMode):
    """Answers what meta tensors cannot, the values of tensors, as if all were zero."""

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, given = getattr(function, "__name__", ""), kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            first = args[0]
            if name in _VALUES:
                return _VALUES[name]
            if name == "tolist":
                return torch.zeros(first.shape, dtype=first.dtype).tolist()
            if name == "nonzero":
                result = torch.zeros(1, first.ndim, dtype=torch.int64, device="meta")
                return result.unbind(1) if given.get("as_tuple") else result
            if name == "where" and len(args) == 1:
                return torch.zeros(1, first.ndim, dtype=torch.int64, device="meta").unbind(1)
            if name == "_grouped_mm" or name == "grouped_mm":
                return first.new_empty(len(first), args[1].shape[-1])
            if name == "unique":
                return first.new_empty(1)
            if name in ("__getitem__", "__setitem__"):
                index = args[1] if isinstance(args[1], tuple) else (args[1],)
                if any(isinstance(one, Tensor) and (one.dtype is torch.bool or not one.ndim) for one in index):
                    args = (first, tuple(part for one in index for part in _places(one)), *args[2:])
        return function(*args, **given)


def _places(index: Any) -> Sequence[Any]:
    if isinstance(index, Tensor) and index.dtype is torch.bool:
        return [torch.zeros(1, dtype=torch.int64, device="meta") for _ in range(index.ndim)]
    return [0] if isinstance(index, Tensor) and not index.ndim else [index]
