"""What compressed-tensors itself writes, and what its own settings say, stand here for what it makes of them again.

Runs where that package is installed (pip install compressed-tensors); 0.20 was tried.
"""

from __future__ import annotations

import json

import pytest
import torch

from kernels.quantization.compressed import Compressed

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

SHAPE = (64, 128)
TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
INT, FLOAT = {"type": "int", "symmetric": True}, {"type": "float", "symmetric": True, "num_bits": 8}
GROUPS = {"strategy": "group", "group_size": 32}
FOURS = INT | GROUPS | {"num_bits": 4}
STATIC = {"strategy": "tensor", "dynamic": False}
LAYOUTS = [
    *(
        ("pack-quantized", {"type": "int", "num_bits": bits, "symmetric": symmetric} | strategy, None)
        for bits in (4, 8)
        for symmetric in (True, False)
        for strategy in (GROUPS, {"strategy": "channel"})
    ),
    ("pack-quantized", FOURS | {"actorder": "static"}, None),
    ("pack-quantized", FOURS, INT | TOKENS),
    ("int-quantized", INT | {"num_bits": 8, "strategy": "channel"}, INT | TOKENS),
    ("int-quantized", INT | {"num_bits": 8, "strategy": "tensor"}, INT | TOKENS),
    ("int-quantized", FOURS, INT | TOKENS),
    ("naive-quantized", INT | {"num_bits": 8, "strategy": "channel"}, INT | TOKENS),
    ("float-quantized", FLOAT | {"strategy": "channel"}, FLOAT | TOKENS),
    ("float-quantized", FLOAT | {"strategy": "tensor"}, FLOAT | STATIC),
    ("float-quantized", FLOAT | {"strategy": "block", "block_structure": [32, 32]}, FLOAT | GROUPS | {"dynamic": True}),
]


class Files(dict):
    has = dict.__contains__
    read = dict.__getitem__


def ranges(weights, weight):
    """The least and the largest of what shares a scale."""
    if weights["strategy"] == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if weights["strategy"] == "block":
        rows, columns = weights["block_structure"]
        blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, weights.get("group_size", weight.shape[1])))
    return groups.amin(2), groups.amax(2)


@pytest.mark.parametrize(("form", "weights", "inputs"), LAYOUTS)
def test_what_the_tool_writes_is_read_as_it_reads_it(form, weights, inputs):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    given = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), input_activations=given)
    scale, zero = calculate_qparams(*ranges(weights, weight), scheme.weights)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
    if inputs is not None and not inputs["dynamic"]:
        state["input_scale"] = torch.tensor([0.02])
    tool = BaseCompressor.get_value_from_registry(form)
    written = tool.compress(state, scheme)
    settings = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    read = Compressed(json.loads(settings.model_dump_json()) | {"quant_method": "compressed-tensors"})
    files, expected = Files({f"m.{name}": tensor for name, tensor in written.items()}), read.tensors("m", SHAPE)
    assert expected is not None
    assert files.keys() <= expected.keys()
    for name, stored in expected.items():
        assert stored.optional or tuple(files[name].shape) in stored.shapes, name
    found = read.read(files, "m", SHAPE).dequantize(torch.float32)
    assert found.equal(tool.decompress(dict(written), scheme)["weight"].float())
