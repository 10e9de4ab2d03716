"""Streams with LoRA adapters on a GPU, as many tokens a second as without, through a ModelRunner.

Adapters of rank 16 change all linear layers of attention and feed-forward; prompts have 512 tokens and outputs 128.
``not loaded``: a runner without room for adapters; ``none``: one with 16 of them, which no request uses.
"""

from __future__ import annotations

import gc
import json
import statistics
from pathlib import Path

from kernels.contract.adapters import AdapterSettings
from tests.bench._device_rows import SHAPES, write_model
from tests.bench._device_runner import Requests, load
from tests.bench._record import record

__all__ = ["adapters"]

_RANK, _LOADED = 16, 16
_STREAMS = (1, 64)
_PROMPT, _OUTPUT, _ROUNDS = 512, 128, 3


def adapters(names: list[str], directory: Path) -> None:
    """Measure, print and record models: rounds without adapters, then those with them on a runner of their own."""
    print("\n| model | streams | adapters | tokens/s | of those without |\n|---|---|---|---|---|", flush=True)
    for name in names:
        path = write_model(name, directory)
        adapter = _write_adapter(SHAPES[name], directory / f"adapter-{name}")
        base = _measure(name, path, None, ("not loaded",), {})
        _measure(name, path, adapter, ("none", "1", str(_LOADED)), base)


def _measure(
    name: str, path: Path, adapter: Path | None, kinds: tuple[str, ...], base: dict[int, float]
) -> dict[int, float]:
    """Tokens a second by number of streams, of the last kind."""
    settings = AdapterSettings(max_rank=_RANK, max_batch=_LOADED) if adapter is not None else None
    runner, info = load(path, adapters=settings)
    if adapter is not None:
        for index in range(1, _LOADED + 1):
            runner.load_adapter(index, str(adapter))
    result: dict[int, float] = {}
    for streams in _STREAMS:
        for kind in kinds:
            used = int(kind) if kind.isdigit() else 0
            if used > streams:
                continue
            Requests(runner, info, streams, _PROMPT, _OUTPUT, used).run()
            seconds = [Requests(runner, info, streams, _PROMPT, _OUTPUT, used).run() for _ in range(_ROUNDS)]
            rates = [streams * _OUTPUT / each for each in seconds]
            result[streams] = statistics.median(rates)
            point = f"{name} {streams} streams, adapters: {kind}"
            record(point, "throughput", rates, "tokens/s")
            line = f"| {name} | {streams} | {kind} | {result[streams]:.0f} |"
            if base:
                record(point, "speed, of that without", result[streams] / base[streams], "times")
                line += f" {result[streams] / base[streams]:.3f} |"
            print(line, flush=True)
    runner.close()
    del runner
    gc.collect()
    import torch

    torch.cuda.empty_cache()
    return result


def _write_adapter(shape: dict[str, object], directory: Path) -> Path:
    """An adapter of made-up numbers for all layers of a model like Llama."""
    import torch
    from safetensors.torch import save_file

    sizes = {key: value for key, value in shape.items() if isinstance(value, int)}
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes.get("head_dim", 0)
    head = head or hidden // sizes["num_attention_heads"]
    queries, keys = head * sizes["num_attention_heads"], head * sizes["num_key_value_heads"]
    modules = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        for module, (outputs, inputs) in modules.items():
            place = f"base_model.model.model.layers.{layer}.{module}"
            for side, rows, columns in (("A", _RANK, inputs), ("B", outputs, _RANK)):
                numbers = torch.randn(rows, columns, generator=generator) * 0.01
                tensors[f"{place}.lora_{side}.weight"] = numbers.bfloat16()
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted({module.split(".")[1] for module in modules})
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
