"""Tables of model families, devices and features as Markdown, from the registry of models and what devices say."""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from kernels.devices.cpu.device import CpuDevice
from kernels.devices.cuda.features import FEATURES as CUDA
from kernels.devices.features import DeviceFeatures
from kernels.devices.npu.features import FEATURES as NPU
from kernels.models.registry import BUILT_IN, Support, families
from tests.kits.device_features import features_of
from tests.kits.fallback import RUNS, TABLE
from tests.kits.families import COMPARED, PROOFS, architecture

__all__ = ["architectures", "code", "code_architectures", "matrix", "proofs"]

DEVICES: Mapping[str, DeviceFeatures] = {"CPU": features_of(CpuDevice(1)), "NVIDIA GPU": CUDA, "Ascend NPU¹": NPU}
FEATURES: Mapping[str, str] = {
    "F": "float weights",
    "Q": "quantized weights",
    "K": "cache of int8",
    "E": "cache of fp8",
    "S": "speculative decoding",
    "T": "tensor parallelism",
    "G": "decode steps captured into graphs, or on a CPU into programs of native operators",
}
_TESTED: Mapping[str, str] = {"NVIDIA GPU": "cuda", "Ascend NPU¹": "npu"}
"""Columns whose cells are marked where no test compares a family's answers."""


_PROVEN: Mapping[str, str] = {"cpu": "C", "cuda": "G", "npu": "N"}


def matrix() -> str:
    """A row for the families that work alike, a column for each device; most capable families first."""
    files: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, _, (*devices, gguf) in _families():
        files[name, *devices].add(gguf)
    alike: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for (name, *devices), ggufs in files.items():
        alike[*devices, "yes" if "yes" in ggufs else "no"].add(name)
    rows = sorted(alike.items(), key=lambda row: (-len("".join(row[0]).replace("²", "")), row[1]))
    lines = [["; ".join(sorted(names)), *cells] for cells, names in rows]
    others = f"{len(code_architectures())} other architectures, by [transformers' code](.github/docs/models.md)"
    table = _table(["families", *DEVICES, "GGUF"], [*lines, [others, *["F Q T"] * len(DEVICES), "no"]])
    legend = ", ".join(f"{letter} {feature}" for letter, feature in FEATURES.items())
    npu = (
        " ¹ The NPU code has run on a simulator under the real torch_npu, never on NPU hardware. Latent attention is "
        "captured there in DeepSeek's sizes alone. On a CPU DeepSeek V2 has no programs, as it groups experts; V2-Lite "
        "has."
    )
    untested = " ² No test compares this family's answers on this device." if "²" in table else ""
    proofs = " [What tests compare](.github/docs/models.md#what-tests-compare), by family and device."
    return f"{table}\n\n{legend}.{npu}{untested}{proofs}"


def proofs() -> str:
    """A row for the families that tests compare alike, a column for each property: the devices where they do."""
    modules = {entry.architecture: entry.module for entry in BUILT_IN}
    tested = {
        (feature, device): {modules[architecture(name)] for name in names}
        for feature, devices in PROOFS.items()
        for device, names in devices.items()
    }
    alike: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for name, own, cells in _families():
        captures = dict(zip(DEVICES, cells, strict=False))
        found = []
        for feature in PROOFS:
            letters = []
            for column, (device, letter) in zip(DEVICES, _PROVEN.items(), strict=True):
                possible = feature != "graphs" or "G" in captures[column]
                if possible and modules[own] in tested.get((feature, device), ()):
                    letters.append(letter)
            found.append(" ".join(letters) or "–")
        alike[tuple(found)].add(name)
    rows = sorted(([("; ".join(sorted(names))), *found] for found, names in alike.items()), key=lambda row: row[0])
    return _table(["families", *PROOFS], rows)


def architectures() -> str:
    """The family of each architecture that is built in."""
    rows = sorted([f"`{architecture}`", name] for name, architecture, _ in _families())
    return _table(["`architectures` of config.json", "family"], rows)


def code_architectures() -> list[str]:
    """Architectures that run by transformers' modeling code with its results, and that no family is built in for."""
    table = json.loads(TABLE.read_text(encoding="utf-8")).values()
    native = {entry.architecture for entry in BUILT_IN}
    return sorted({entry["architecture"] for entry in table if entry["result"] == RUNS} - native)


def code() -> str:
    """The list of these architectures."""
    return ", ".join(f"`{name}`" for name in code_architectures()) + "."


def _families() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, architecture and cells of each family."""
    modules = {entry.architecture: entry.module for entry in BUILT_IN}
    tested = {column: {modules[architecture(name)] for name in COMPARED[device]} for column, device in _TESTED.items()}
    for family in families():
        module = modules.get(family.architecture)
        if module is None:
            continue
        does = [
            " ".join(_letters(family, features, device == "CPU"))
            + ("²" if module not in tested.get(device, {module}) else "")
            for device, features in DEVICES.items()
        ]
        yield _name(module), family.architecture, (*does, "yes" if family.gguf else "no")


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)])


def _letters(family: Support, features: DeviceFeatures, cpu: bool) -> Iterator[str]:
    """What a device does for a family, by the letters of ``FEATURES``. Every device has linear layers of floats, a
    cache whose tokens can be moved, and states in plain torch: draft tokens need no more to be verified. What a device
    does not plan runs in plain torch, which reads rows on the host; a CPU's programs have the operators of plain
    families alone."""
    eager, compressed = (
        bool(family.attention - features.plans),
        family.indexed and not (family.latent or family.states or family.paged),
    )
    yield "F"
    if family.quantizable:
        yield "Q"
    if not (family.states or compressed) and "int8" in features.cache_dtypes:
        yield "K"
    if not (family.states or compressed) and any(name.startswith("fp8") for name in features.cache_dtypes):
        yield "E"
    yield "S"
    if features.collectives:
        yield "T"
    planned = not family.indexed and (not family.latent or features.plans_latent)  # an indexer reads rows on the host
    captured = not eager and planned and (not family.states or features.captures_states)
    if features.captures and captured and (family.plain or not cpu):
        yield "G"


def _name(module: str) -> str:
    """The family's name: the first words of its file, before the paper in parentheses."""
    file = Path(__file__).parents[2] / f"{module.replace('.', '/')}.py"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition(" (")[0]
