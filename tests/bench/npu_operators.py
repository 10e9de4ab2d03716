"""The operators of torch_npu that the engine uses: `python -m tests.bench npu_operators` prints them as a table.

The included model, and one of experts, run on a simulated A2, A3 and A5, each in a process of its own, and what they
call is what stands in the table. The column "checked by" says what each call was held against: the vendor's schema
(always: the call goes through the real dispatcher), the vendor's meta function where there is one, the simulator's
reference. Nothing here has been seen on hardware. ``--counts`` prints the operators that a decode launches in each
layer and around the layers, beside those of other engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from kernels.contract.step import SlotSampling
from tests.bench._needs import need_npu
from tests.bench._npu_counts import OTHERS, OTHERS_AROUND, layer_operators, operators_around
from tests.bench._npu_models import models, own_kernels
from tests.bench._options import command_line

GENERATIONS = ("A2", "A3", "A5")

USES = {
    "npu_fused_infer_attention_score": "attention of prefills, chunks, decodes and both together, over the paged cache",
    "npu_fused_infer_attention_score.out": "the same inside a captured graph",
    "_npu_fused_infer_attention_score_get_max_workspace": "its workspace, when a graph is captured",
    "_npu_fused_infer_attention_score_infer_output": "its output, when a graph is captured",
    "npu_fused_infer_attention_score_v2": "attention with sinks",
    "npu_fused_infer_attention_score_v2.out": "the same inside a captured graph",
    "_npu_fused_infer_attention_score_v2_get_max_workspace": "its workspace, when a graph is captured",
    "_npu_fused_infer_attention_score_v2_infer_output": "its output, when a graph is captured",
    "npu_kv_rmsnorm_rope_cache": "norm and rotation of latent vectors, into the pages of the cache",
    "npu_mla_prolog_v3": "projections to latent attention, with norms, rotations and the write to the cache; sizes of "
    "DeepSeek V3",
    "npu_transpose_batchmatmul": "queries into the latent space, and results out of it",
    "npu_lightning_indexer": "the tokens that sparse attention reads",
    "npu_sparse_flash_attention": "attention over these tokens",
    "npu_rms_norm": "first norm; norm of query and key heads",
    "npu_add_rms_norm": "norm after adding to the residual",
    "npu_add_rms_norm_dynamic_quant": "the same, with the tokens quantized to int8 for the next projection",
    "npu_add_rms_norm_quant": "the same, quantized with a static scale",
    "npu_add_rms_norm_dynamic_mx_quant": "the same, quantized to MXFP8",
    "npu_apply_rotary_pos_emb": "rotary position embedding of queries and keys",
    "npu_rotary_mul": "the same where the former does not apply: other head dims, parts of heads, A5",
    "npu_swiglu": "activation of the feed-forward layers",
    "npu_scatter_pa_kv_cache": "keys and values into the pages of the cache",
    "npu_format_cast": "16-bit weights into the cube unit's tiles, at load",
    "npu_dynamic_quant": "quantizes tokens to int8, for int8 projections and caches",
    "npu_quant_matmul": "products of int8, and of MXFP8 on A5",
    "npu_dynamic_mx_quant": "quantizes tokens to MXFP8, for projections and experts of MXFP8 checkpoints",
    "npu_quantize": "quantizes tokens with a static scale, for static W8A8 checkpoints",
    "npu_convert_weight_to_int4pack": "weights of 4 bits in the device's packing, at load",
    "npu_weight_quant_batchmatmul": "products of 4-bit and 8-bit weights in groups with float inputs",
    "npu_moe_gating_top_k_softmax_v2": "selects the experts of a token and their weights",
    "npu_moe_gating_top_k": "the same by a sigmoid with a bias, in groups of experts",
    "npu_moe_init_routing_v2": "sorts tokens by expert, quantized to int8 for int8 experts, and by adapter",
    "npu_grouped_matmul": "products of all experts, or of all adapters, in one call",
    "npu_grouped_matmul_swiglu_quant_v2": "int8 experts' first product, their activation and its quantization",
    "npu_moe_finalize_routing": "sums the results of a token's experts by their weights",
    "npu_top_k_top_p": "top-k and top-p (--sampling-backend ascend, the default where there is a kernel)",
    "troupe.split_norm_rope_cache": "our own kernel: norm and rotation of queries and keys, and the write to the cache",
    "troupe.draw": "our own kernel: top-k, top-p, noise and the choice of a token",
}
"""Where an operator is used, in words; one that is called and missing here ends the program."""


def main(argv: list[str]) -> None:
    parser = command_line(__name__, __doc__)
    parser.add_argument("generation", nargs="?", choices=GENERATIONS, help="print what is called on this one, as JSON")
    parser.add_argument("--counts", action="store_true", help="print how many a decode launches, alone")
    given = parser.parse_args(argv)
    need_npu(simulated=True)
    if given.counts:
        _print_counts()
        return
    if given.generation is not None:
        print(json.dumps(called(given.generation)))
        return
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for generation in GENERATIONS:
        command = [sys.executable, "-m", "tests.bench", "npu_operators", generation]
        done = subprocess.run(
            command,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TROUPE_NPU_SIMULATOR": generation},
        )
        for name, checked in json.loads(done.stdout.splitlines()[-1]).items():
            found[name][generation] = checked
    unknown = sorted(set(found) - set(USES))
    if unknown:
        sys.exit(f"called, but USES does not say where: {', '.join(unknown)}")
    print("| Operator | Used for | SoC | Checked by | Hardware |")
    print("| --- | --- | --- | --- | --- |")
    for name, use in USES.items():
        if name in found:
            checked = next(iter(found[name].values()))
            print(f"| `{name}` | {use} | {', '.join(found[name])} | {checked} | none yet |")


def _print_counts() -> None:
    from kernels.devices.npu_simulator.activate import activate

    activate(os.environ.get("TROUPE_NPU_SIMULATOR", "A2"))
    print("| Model | Troupe | with Triton-Ascend | SGLang 0.5.23 (read) | vLLM-Ascend 0.23.0 (read) |")
    print("| --- | --- | --- | --- | --- |")
    for kind, (one, other) in OTHERS.items():
        with tempfile.TemporaryDirectory() as folder:
            counts = " | ".join(str(len(layer_operators(kind, Path(folder), own))) for own in (False, True))
            print(f"| {kind} | {counts} | {one} | {other} |", flush=True)
    print(
        "\n| Around the layers | one by one | in graphs | in graphs, Triton-Ascend "
        "| SGLang (read) | vLLM-Ascend (read) |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        torch_npu, own = (operators_around(Path(folder), own) for own in (False, True))
        for name, (one, other) in OTHERS_AROUND.items():
            launched, in_graphs = torch_npu[name]
            print(f"| {name} | {len(launched)} | {in_graphs} | {own[name][1]} | ~{one} | ~{other} |")


def called(generation: str) -> dict[str, str]:
    """The npu operators that the engine's runner calls on this generation, and by what each is checked."""
    from kernels.devices.npu_simulator.activate import activate

    activate(generation)
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from kernels.devices.npu_triton.operators import NAMESPACE
    from kernels.execution.runner import ModelRunner
    from tests.kits.driver import Driver

    names: set[str] = set()

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace in ("npu", NAMESPACE):
                names.add(str(func).removeprefix("npu.").removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    with Listening(), tempfile.TemporaryDirectory() as scratch:
        for config in models(Path(scratch)).values():
            runner = ModelRunner(config)
            driver = Driver(runner, runner.load())  # which runs it, too
        for own in (False, True):
            with own_kernels(own):
                runner = ModelRunner(config)
                driver = Driver(runner, runner.load())
            driver.admit(1, range(20, 60), sampling=SlotSampling(temperature=0.8, top_k=20, top_p=0.9, seed=1))
            driver.step([(1, 40)])
            driver.admit(2, range(30, 80))
            driver.step([(1, 1), (2, 30)])
            driver.step([(1, 1), (2, 20)])
            driver.step([(1, 1), (2, 1)])
    has_meta = torch._C._dispatch_has_kernel_for_dispatch_key

    def checked(name: str) -> str:
        if name.startswith(NAMESPACE):
            return "Triton's interpreter, torch reference"
        vendor = has_meta(f"npu::{name}", "Meta")
        return "schema, vendor meta, simulator reference" if vendor else "schema, simulator reference"

    return {name: checked(name) for name in sorted(names)}
