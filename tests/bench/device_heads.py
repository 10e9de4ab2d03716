"""Heads and attention of one token a row between their products: ``python -m tests.bench device --only heads``.

A chain of layers, each its q, k, v and output products with what stands between them, is one CUDA graph, in which a
launch may start while the one before it ends. Microseconds of a layer, the median of replays in turns: the products
alone, with the two kernels that place heads and attend to them, and with the one that does both, for each shape of its
programs; the first is the one that serving takes. The lengths of the rows are changed between replays, as when serving.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tests.bench._device_rows import CONTEXT, PAGE_SIZE, SHAPES
from tests.bench.device_products import projections

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.cuda.raw_heads import Shape

__all__ = ["heads"]

LAYERS = 32
ROWS = (1, 4, 16)
CONTEXTS = (160, 384, 600, 4096)
SHAPED = ((64, 4, 3, 64), (64, 4, 3, 256), (128, 4, 3, 128), (128, 4, 3, 256), (128, 8, 3, 256), (256, 8, 3, 256))
"""Tokens that are read first, warps, stages, and tokens of a part."""
ROUNDS = 9


def heads(names: Sequence[str]) -> None:
    """Measure and print, a number of rows at a time."""
    import torch

    with torch.inference_mode():
        for name in names:
            print(
                f"\n| {name}, rows | way | " + " | ".join(f"{context} tokens" for context in CONTEXTS) + " |",
                flush=True,
            )
            print("|---|---|" + "---|" * len(CONTEXTS), flush=True)
            model = _Model(name)
            for rows in ROWS:
                _measure(model, rows)


class _Model:
    """Products and caches of ``LAYERS`` layers, and what the largest step needs."""

    def __init__(self, name: str) -> None:
        import torch

        from kernels.cuda.decode import DecodeScratch
        from kernels.cuda.linear import CudaLinear

        config, rows = SHAPES[name], max(ROWS)
        self.name, self.heads, self.kv_heads = name, config["num_attention_heads"], config["num_key_value_heads"]
        self.hidden = config["hidden_size"]
        self.dim = config.get("head_dim", self.hidden // self.heads)
        some = [shape for what, shape in projections(name).items() if what in ("q, k, v", "output")]

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

        def layer() -> list[CudaLinear]:
            return [CudaLinear(made(outputs, inputs) / inputs**0.5, None) for outputs, inputs, _ in some]

        self.products = [layer() for _ in range(LAYERS)]
        columns = -(-max(CONTEXTS) // PAGE_SIZE)
        count = 1 + rows * columns
        self.caches = [made(count, 2, self.kv_heads, PAGE_SIZE, self.dim) for _ in range(LAYERS)]
        self.gains = made(self.heads + self.kv_heads, self.dim) if "Qwen3" in config["architectures"][0] else None
        self.x, self.attended = made(rows, self.hidden), made(rows, self.heads, self.dim)
        angle = made(rows, 1, self.dim // 2)
        self.cos, self.sin = (torch.cat(both, -1) for both in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin())))
        self.state = torch.zeros(rows, 1 + CONTEXT // PAGE_SIZE, dtype=torch.int32, device="cuda")
        shuffled = 1 + torch.randperm(count - 1, device="cuda").view(rows, columns)
        self.state[:, 1 : 1 + columns] = shuffled
        self.places = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.scratch = DecodeScratch(torch.device("cuda", torch.cuda.current_device()))

    def lengthen(self, context: int) -> None:
        """Rows of this many tokens, the new one included."""
        self.state[:, 0] = context
        page = self.state[:, 1 + (context - 1) // PAGE_SIZE].long()
        self.places.copy_(page * PAGE_SIZE + (context - 1) % PAGE_SIZE)

    def run(self, rows: int, way: str, shape: Shape | None) -> Tensor:
        from kernels.cuda.decode import attend_decodes, attend_raw, split_count
        from kernels.cuda.heads import place_heads
        from kernels.cuda.raw_heads import RawHeads

        x = self.x[:rows]
        splits = split_count(rows, self.kv_heads, CONTEXT)
        cos, sin, places = self.cos[:rows], self.sin[:rows], self.places[:rows]
        pages, lengths = self.state[:rows, 1:], self.state[:rows, 0]
        scale = self.dim**-0.5
        for (qkv, output), cache in zip(self.products, self.caches, strict=True):
            projected = qkv(x)
            every, found = projected.view(rows, -1, self.dim), self.attended[:rows]
            if way == "two kernels":
                place_heads(every, self.heads, self.kv_heads, self.gains, 1e-6, cos, sin, cache, places)
                found = x.new_empty(rows, self.heads, self.dim)
                queries = every[:, : self.heads]
                attend_decodes(queries, cache, pages, lengths, 0, scale, splits, self.scratch, found)
            elif way != "products":
                found = x.new_empty(rows, self.heads, self.dim)
                raw = RawHeads(self.gains, 1e-6, cos, sin, places)
                attend_raw(every, raw, cache, pages, lengths, 0, scale, splits, self.scratch, found, shape)
            x = output(found.view(rows, -1))
        return x


def _measure(model: _Model, rows: int) -> None:
    import torch

    from kernels.cuda.raw_heads import Shape

    ways: dict[str, Shape | None] = {"products": None, "two kernels": None, "one": None}
    for lead, warps, stages, part in SHAPED:
        ways[f"one, {lead} tokens, {warps} warps, {stages} stages, parts of {part}"] = Shape(lead, warps, stages, part)
    graphs: dict[str, Callable[[], None]] = {}
    found: dict[str, Tensor] = {}
    model.lengthen(CONTEXTS[0])
    for way, shape in ways.items():
        model.run(rows, way, shape)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found[way] = model.run(rows, way, shape)
        graphs[way] = graph.replay
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for context in CONTEXTS:
        model.lengthen(context)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, replay in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                replay()
                replay()
                end.record()
                torch.cuda.synchronize()
                times[way].append(begin.elapsed_time(end) / 2 / LAYERS * 1e3)
        wanted = found["two kernels"].float()
        for way in ways:
            taken[way].append(statistics.median(times[way]))
            if way != "products":
                error = float((found[way].float() - wanted).norm() / wanted.norm())
                assert error < 0.05, f"{way}, {context} tokens: {error}"
    for way, medians in taken.items():
        print(f"| {rows} | {way} | " + " | ".join(f"{median:.2f}" for median in medians) + " |", flush=True)
