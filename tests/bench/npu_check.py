"""What a first run on real NPUs should find out: ``python -m tests.bench npu_check``, some minutes on a simulated one.

It goes on after what fails, and names each thing that the device refuses or computes otherwise:

- numbers that sampling and drafts rely on: whole numbers that wrap, shifts, walks of trees, against the CPU;
- every operator of torch_npu that the engine calls, with the arguments of that very call, held against the reference
  on the CPU; where the device refuses a call, its error is kept and the reference's answer taken in its place;
- our own kernels, where Triton-Ascend is installed, against torch;
- steps: greedy answers without graphs, in graphs, with a cache of int8, and with draft tokens in trees; and whether
  tokens that are drawn in graphs are those that are drawn without;
- on the CPU the same model, for how likely it finds those answers.

On simulated NPUs (TROUPE_NPU_SIMULATOR=A2) the references are held against themselves.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kernels.contract.config import RunnerConfig
from kernels.contract.step import Admission, SlotSampling, StepBatch
from tests.bench._needs import need_npu
from tests.bench._npu_models import models, own_kernels
from tests.bench._options import command_line

__all__ = ["main"]

PROMPTS = ("What is the capital of France?", "Write a short story about a lighthouse.")
LENGTH = 24
DRAWN = 6
"""Steps whose tokens are drawn."""
CLOSE = 0.02
"""Tolerance of floats, as a share of the result's largest number."""
STEP = 0.125
"""The same for 8-bit floats."""
ALIKE = 2
"""Calls of a load or a step that differ in nothing but numbers of tokens, and are looked at."""
LIKELY = 0.3
"""By which the CPU may find its own choice likelier than the NPU's, on average, in logarithms."""

_OWN = "steps with our own kernels"
NOTHING = {"npu_add_rms_norm_quant": {1}, "npu_add_rms_norm_dynamic_quant": {1, 4}}
"""Results that mean nothing, by their index."""


@dataclass
class Row:
    """An operator's calls: how many, the largest difference of floats as a share, what was refused or differs."""

    calls: int = 0
    off: float = 0.0
    wrong: str = ""
    refused: bool = False


def main(argv: list[str]) -> None:
    command_line(__name__, __doc__).parse_args(argv)
    simulated = os.environ.get("TROUPE_NPU_SIMULATOR", "")
    need_npu(bool(simulated))
    if simulated:
        from kernels.devices.npu_simulator.activate import activate

        activate(simulated)
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for what, found, fine in _all(Path(scratch)):
            wrong += not fine
            print(f"{'ok   ' if fine else 'WRONG'} {what}: {found}", flush=True)
    sys.exit(f"{wrong} of these are wrong" if wrong else 0)


def _all(scratch: Path) -> Iterator[tuple[str, str, bool]]:
    """Each check: what it looked at, what it found, and whether that is correct."""
    from kernels.devices.select import select_device

    configs = models(scratch)
    plain = configs["plain"]
    platform = select_device(plain)  # raises, with what to do, where there is no NPU
    yield "device", _versions(platform.name), True
    yield from _numbers(platform.torch_device)
    yield from _own_kernels(platform.torch_device)
    for name, row in _operators(configs).items():
        yield name, f"{row.calls} calls, {row.wrong or f'off by {row.off:.2g} at most'}", not row.wrong
    yield from _steps(plain)
    yield from _drawn(plain)


def _versions(device: str) -> str:
    import torch
    import torch_npu

    return f"{device}, torch {torch.__version__}, torch_npu {torch_npu.__version__}, CANN {torch.version.cann}"


def _numbers(device: Any) -> Iterator[tuple[str, str, bool]]:
    import torch

    from kernels.core.noise import block_noise, exponential_noise, keys_at, seed_key
    from kernels.core.tree import chain, unpack_bits, within_window
    from kernels.speculation.verify import walk

    generator = torch.Generator().manual_seed(1)
    tokens, sampled = (torch.randint(3, (9, 6), generator=generator) for _ in range(2))
    keys = torch.tensor([seed_key(seed) for seed in range(9)], dtype=torch.int32)
    ids = torch.arange(4096, dtype=torch.int32)

    def hashes(place: Callable[[Any], Any]) -> Any:
        return block_noise(keys_at(place(keys), place(torch.arange(9)))[:, None], place(ids))[1]

    def times(place: Callable[[Any], Any]) -> Any:
        return exponential_noise(keys_at(place(keys), place(torch.arange(9)))[:, None], place(ids))

    def walked(place: Callable[[Any], Any]) -> Any:
        found = walk(chain(place(tokens)), place(torch.arange(9) % 6 + 1), place(sampled), 5)
        return torch.cat((found.path, found.counts[:, None], found.tokens), 1)

    def seen(place: Callable[[Any], Any]) -> Any:
        return unpack_bits(within_window(chain(place(tokens)).bits, 3), 6)

    checks = {"whole numbers wrap": hashes, "noise": times, "walks of chains": walked, "bits of trees": seen}
    for name, compute in checks.items():
        try:
            found = compute(lambda tensor: tensor.to(device)).cpu()
        except RuntimeError as error:
            yield name, f"refused: {_line(error)}", False
            continue
        expected = compute(lambda tensor: tensor)
        close = torch.allclose(found, expected, rtol=1e-5) if found.is_floating_point() else found.equal(expected)
        yield name, "as on the CPU" if close else "other numbers than on the CPU", close


def _own_kernels(device: Any) -> Iterator[tuple[str, str, bool]]:
    from kernels.devices.npu_triton.operators import REFERENCES, registered
    from kernels.devices.npu_triton.selection import check_kernel, has_compiler

    for name in REFERENCES:
        if not has_compiler() and not registered(name):
            yield f"our own {name}", "not used: Triton-Ascend is not installed", True
            continue
        wrong = check_kernel(name, device)
        yield f"our own {name}", wrong or "as torch", not wrong


def _operators(configs: dict[str, RunnerConfig]) -> dict[str, Row]:
    """Operators that models of all kinds call while loading and in a few steps without graphs, and the models that
    fail."""
    import importlib
    import pkgutil

    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    from kernels.devices.npu_simulator import operators
    from kernels.devices.npu_simulator.operators.reference import REFERENCES

    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)
    rows: dict[str, Row] = {}
    seen: Counter[tuple[Any, ...]] = Counter()

    class Held(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = str(func).removeprefix("npu.").removesuffix(".default")
            entry = REFERENCES.get(name) if func.namespace == "npu" else None
            if entry is None or entry.host:
                return func(*args, **kwargs)
            kind = (name, *(_kind(value) for value in (*args, *kwargs.items())))
            seen[kind] += 1
            row = rows.setdefault(name, Row())
            if seen[kind] > ALIKE and not row.refused:
                return func(*args, **kwargs)
            row.calls += 1
            here, named = tree_map_only(Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
            try:
                found = func(*args, **kwargs)
                torch.npu.synchronize()  # so that an error is this operator's
            except RuntimeError as error:
                row.refused, found = True, None
                row.wrong = row.wrong or f"refused: {_line(error)}"
            expected = entry.compute(*here, **named)
            written = [
                (given, reference)
                for argument, given, reference in zip(func._schema.arguments, args, here, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            if row.refused:
                for given, reference in written:
                    given.copy_(reference)
                return tree_map_only(Tensor, lambda tensor: tensor.npu(), expected)
            pairs = [*zip(_flat(found), _flat(expected), strict=True), *written]
            for index, (given, reference) in enumerate(pairs):
                if index not in NOTHING.get(name, ()) and isinstance(given, Tensor) and given.numel():
                    _compare(row, given.cpu(), reference)
            return found

    sampling = SlotSampling(0.8, top_k=20, top_p=0.9)
    with own_kernels(False), Held():
        for name, config in configs.items():
            seen.clear()
            try:
                _generate(msgspec.structs.replace(config, disable_graphs=True), 3, sampling, seen.clear)
            except Exception as error:
                rows[f"model: {name}"] = Row(wrong=f"fails: {_line(error)}")
    return rows


def _kind(value: Any) -> Any:
    """The signature of a call: dtype and layout of tensors, values of other arguments."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.dtype, value.dim(), value.shape[-1:]
    if isinstance(value, (list, tuple)):
        return tuple(_kind(one) for one in value[:2])
    return value if isinstance(value, (str, bool)) else type(value)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _compare(row: Row, found: Any, expected: Any) -> None:
    import torch

    if found.shape != expected.shape or found.dtype != expected.dtype:
        row.wrong = row.wrong or f"gives {found.dtype} {tuple(found.shape)}, not {expected.dtype} {expected.shape}"
    elif found.is_floating_point():
        right = expected.float()
        meant = ~right.isnan()  # the reference has none but where nothing is said
        wide, right = found.float()[meant], right[meant]
        cut = right.isinf()
        if not wide[cut].equal(right[cut]):
            row.wrong = row.wrong or "cuts other numbers off"
        wide, right = wide[~cut], right[~cut]
        off = float(((wide - right).abs().amax() / right.abs().amax().clamp_min(1e-6)).item()) if len(wide) else 0.0
        row.off = max(row.off, off if off == off else float("inf"))
        if not off <= (CLOSE if found.itemsize > 1 else STEP):
            row.wrong = row.wrong or f"is off by {row.off:.2g} of its largest number"
    else:
        most = 1 if found.dtype == torch.int8 else 0  # of numbers that are rounded, one may fall on the other side
        if int((found.long() - expected.long()).abs().max()) > most:
            row.wrong = row.wrong or "gives other whole numbers"


def _steps(plain: RunnerConfig) -> Iterator[tuple[str, str, bool]]:
    from app.understudy.drafts import draft_path
    from kernels.contract.speculation import SpeculativeSettings
    from kernels.devices.npu_triton.operators import REFERENCES, registered
    from kernels.devices.npu_triton.selection import has_compiler

    replace = msgspec.structs.replace
    trees = SpeculativeSettings("EAGLE3", str(draft_path("EAGLE3")), num_steps=4, topk=3, num_draft_tokens=6)
    variants = {
        "steps without graphs": replace(plain, disable_graphs=True),
        "steps in graphs": plain,
        "draft tokens in trees": replace(plain, speculation=trees),
        "cache of int8": replace(plain, kv_cache_dtype="int8"),
        _OWN: plain,
    }
    for name, config in variants.items():
        if name == _OWN and not (has_compiler() or all(map(registered, REFERENCES))):
            continue
        try:
            with own_kernels(name == _OWN):
                generated, graphs = _generate(config, LENGTH, SlotSampling(temperature=0.0))
        except Exception as error:
            yield name, f"refused: {_line(error)}", False
            continue
        less = _less_likely(plain, generated)
        captured = bool(graphs) != config.disable_graphs
        found = f"{less:.3f} less likely a token than what the CPU says, graphs of {graphs or 'no'} rows"
        yield name, found, less < LIKELY and captured


def _drawn(plain: RunnerConfig) -> Iterator[tuple[str, str, bool]]:
    """Tokens are drawn by torch's operators in a graph of each form, and one by one without graphs."""
    samplings = {
        "a temperature": SlotSampling(temperature=0.8, seed=3),
        "top-p": SlotSampling(temperature=0.8, top_p=0.9, seed=3),
        "top-k and top-p": SlotSampling(temperature=0.8, top_k=20, top_p=0.9, seed=3),
    }
    for name, sampling in samplings.items():
        what = f"tokens drawn in graphs, {name}"
        try:
            alone, _ = _generate(msgspec.structs.replace(plain, disable_graphs=True), DRAWN, sampling)
            generated, graphs = _generate(plain, DRAWN, sampling)
        except Exception as error:
            yield what, f"refused: {_line(error)}", False
            continue
        found = "the same as without graphs" if generated == alone else "others than without graphs"
        yield what, f"{found}, graphs of {graphs or 'no'} rows", generated == alone and bool(graphs)


def _tokens() -> list[list[int]]:
    from tokenizers import Tokenizer

    from app.understudy import MODEL_DIR

    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def _batch(number: int, counts: list[int], admitted: tuple[Admission, ...] = (), drafts: int = 0) -> StepBatch:
    def pack(values: list[int]) -> bytes:
        return np.asarray(values, np.int32).tobytes()

    slots = list(range(1, len(counts) + 1))
    given = pack([drafts] * len(slots)) if drafts else b""
    return StepBatch(number, pack(slots), pack([1] * len(slots)), pack(counts), admitted=admitted, draft_limits=given)


def _admitted(prompts: list[list[int]], sampling: SlotSampling, page_size: int) -> tuple[Admission, ...]:
    pages = -(-(max(map(len, prompts)) + 2 * LENGTH) // page_size)
    return tuple(
        Admission(
            slot,
            1,
            np.asarray(prompt, np.int32).tobytes(),
            len(prompt),
            0,
            np.arange(1 + (slot - 1) * pages, 1 + slot * pages, dtype=np.int32).tobytes(),
            sampling,
        )
        for slot, prompt in enumerate(prompts, 1)
    )


def _generate(
    config: RunnerConfig, steps: int, sampling: SlotSampling, before: Callable[[], object] = lambda: None
) -> tuple[list[list[int]], tuple[int, ...]]:
    """Prompts and ``steps`` tokens after each, or more with draft tokens; and rows of the graphs there are. ``before``
    each step something may be called."""
    from kernels.execution.runner import ModelRunner

    runner, prompts = ModelRunner(config), _tokens()
    info = runner.load()
    admitted = _admitted(prompts, sampling, info.page_size)
    generated, counts = [list(prompt) for prompt in prompts], [len(prompt) for prompt in prompts]
    drafts = 0 if config.speculation is None else 5
    for number in range(1, steps + 1):
        before()
        result = runner.run(_batch(number, counts, admitted if number == 1 else (), drafts if number > 1 else 0))
        if result.failed:
            raise RuntimeError(str(result.failed[0]))
        tokens = iter(np.frombuffer(result.tokens, np.int32).tolist())
        for row, accepted in zip(generated, np.frombuffer(result.accepted, np.int32).tolist(), strict=True):
            row.extend(next(tokens) for _ in range(accepted))
        counts = [1] * len(prompts)
        if min(len(row) - len(prompt) for row, prompt in zip(generated, prompts, strict=True)) >= steps:
            break
    return generated, tuple(info.graph_rows)


def _less_likely(plain: RunnerConfig, generated: list[list[int]]) -> float:
    """Mean log-probability by which the CPU prefers its own choice to the given continuation."""
    from kernels.execution.runner import ModelRunner

    runner = ModelRunner(msgspec.structs.replace(plain, device="cpu", dtype="float32"))
    runner.load()
    lost: list[float] = []
    sampling = SlotSampling(temperature=0.0, prompt_logprobs=1)
    admitted = _admitted(generated, sampling, plain.page_size)
    result = runner.run(_batch(1, [len(row) for row in generated], admitted))
    chosen = np.frombuffer(result.prompt_logprobs, np.float32)
    best = np.frombuffer(result.prompt_top_logprobs, np.float32)[
        np.cumsum(np.frombuffer(result.prompt_top_counts, np.int32)) - np.frombuffer(result.prompt_top_counts, np.int32)
    ]
    at = 0
    for row, prompt in zip(generated, _tokens(), strict=True):
        new = slice(at + len(prompt) - 1, at + len(row) - 1)
        lost += (best[new] - chosen[new]).tolist()
        at += len(row) - 1
    return float(np.mean(lost))


def _line(error: BaseException) -> str:
    """The most telling line of an error."""
    words = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (words[0] if words else type(error).__name__)[:300]
