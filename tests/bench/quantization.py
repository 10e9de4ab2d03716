"""Measure the accuracy, size and speed of quantized models, in process, without a server.

    python -m tests.bench quantization [--schemes int8 fp8] [--checkpoints gptq-4] [--shapes understudy 0.6b]
                                            [--caches int8 fp8_e4m3 fp8_e4m3:none] [--made DIR ...]

``--schemes``: values of --quantization, and of shapes with made-up weights checkpoints, too: w4a16 and w8a16 (GPTQ in
groups of 128), compressed-w8a8, and gguf-q4_k_m and the like. ``--checkpoints``: layouts that the included model is
written in first; see ``CHECKPOINTS``, "all" for each. They are made by rounding alone; static scales of inputs are
those of 2048 tokens. ``--experts``: they are made of a model of experts instead that says what the one in the box says,
whose accuracy alone is printed. ``--made``: directories of checkpoints of the included model that a tool has written.

First table: the included model under every scheme: perplexity of held-out documents (a seed that no training saw; the
parts that training counts), how much worse it is than that of bf16 and may be at most (1 % at 6 to 8 bits, 5 % at 4 and
5), and the share of the held-out capital questions answered rightly. Second: bytes of weights, and tokens a second of
decodes at batch 1 and 16, schemes in turns in one process each; ``0.6b`` is a Qwen3 shape with made-up weights, and
``moe`` one of Qwen3-MoE.
``--chunk``: tokens of a document that a step takes, for products of few tokens, 0: all at once.
``--device``: cpu or cuda. ``--clock cpu`` counts processor time of all threads, which neighbours disturb less.

``--caches``: values of --kv-cache-dtype, with ":none" by scale 1.0 and else by a scale for each token and head: the
same of the included model, with bytes of a token in the cache and decodes behind a long prompt.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
from pathlib import Path
from typing import Any

from app.understudy import MODEL_DIR
from tests.bench._checkpoints import CHECKPOINTS, EXPERTS, limit_of, made_up_gguf, write
from tests.bench._experts import write_experts
from tests.bench._needs import need_gpu
from tests.bench._options import command_line
from tests.bench._quantized_model import ONLINE, Process, answer
from tests.bench._record import record
from tests.bench.cpu import SHAPES, described
from tests.kits.llama_server import MissingTool

__all__ = ["main"]

FLOATS = "bf16"
CACHES = ("int8", "fp8_e4m3", "fp8_e4m3:none", "fp8_e5m2", "fp8_e5m2:none")
LONG = 3584
MADE_UP: dict[str, dict[str, Any]] = {
    f"w{bits}a16": {"quant_method": "gptq", "bits": bits, "group_size": 128, "desc_act": False, "sym": True}
    for bits in (4, 8)
}
_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
MADE_UP["compressed-w8a8"] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": _GROUP},
    "ignore": ["lm_head"],
}
"""quantization_config of schemes that only checkpoints have."""
FILES = {"gguf-q8": "Q8_0", "gguf-q6_k": "Q6_K", "gguf-q5_k_m": "Q5_K_M", "gguf-q4_k_m": "Q4_K_M", "gguf-q4": "Q4_0"}
"""Mixtures of types that made-up files have, of Qwen3 shapes."""
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


def _model(shape: str, scheme: str, directory: Path) -> tuple[str, str]:
    """Path and load format of a scheme's model."""
    if shape == "understudy":
        return str(MODEL_DIR), "auto"
    config = LLAMA_8B
    if shape in SHAPES:
        config = described(shape)
    if scheme in FILES:
        return str(made_up_gguf(config, FILES[scheme], directory / f"{shape}-{scheme}.gguf")), "auto"
    if scheme in MADE_UP:
        config = config | {"quantization_config": MADE_UP[scheme]}
    path = directory / f"{shape}-{scheme}"
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path), "dummy"


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument(
        "--schemes",
        nargs="*",
        default=list(ONLINE),
        choices=[*ONLINE, *MADE_UP, *FILES],
        help="values of --quantization, and of checkpoints with made-up weights",
    )
    parser.add_argument(
        "--checkpoints",
        nargs="*",
        default=[],
        choices=["all", *CHECKPOINTS],
        help="layouts that the included model is written in",
    )
    parser.add_argument("--experts", action="store_true", help="checkpoints of a model of experts")
    parser.add_argument("--made", nargs="*", type=Path, default=[], help="directories of such checkpoints by a tool")
    parser.add_argument(
        "--shapes",
        nargs="*",
        default=["understudy", "0.6b"],
        choices=[*SHAPES, "understudy", "8b"],
        help="models whose bytes and speed are measured",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="that runs the models")
    parser.add_argument("--caches", nargs="*", default=[], choices=CACHES, help="values of --kv-cache-dtype")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16], help="that decode, of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement; medians count")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a document that a step takes; 0: all at once")
    parser.add_argument("--steps", type=int, default=40, help="decode steps of a round")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU's operators; 0: one a core")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="wall: elapsed time; cpu: processor time"
    )
    parser.add_argument("--skip-accuracy", action="store_true", help="print bytes and speed alone")
    given = parser.parse_args(argv)
    if given.child:
        logging.basicConfig(level=logging.WARNING, format="%(message)s")
        logging.getLogger("troupe.kernels.cuda").setLevel(logging.INFO)  # which products were chosen
        answer(json.loads(given.child))
        return 0
    if given.device == "cuda":
        need_gpu()
    schemes = [FLOATS, *given.schemes]
    layouts = (EXPERTS if given.experts else list(CHECKPOINTS)) if given.checkpoints == ["all"] else given.checkpoints
    if given.experts and not set(layouts) <= set(EXPERTS):
        parser.error(f"--experts: no model of experts is written as {', '.join(sorted(set(layouts) - set(EXPERTS)))}")
    with tempfile.TemporaryDirectory() as directory:
        source = write_experts(Path(directory) / "experts") if given.experts else MODEL_DIR
        box = _written(layouts, Path(directory), source)
        box |= {path.name: path for path in given.made}
        if not given.skip_accuracy:
            own = [scheme for scheme in schemes if scheme not in MADE_UP | FILES]
            _scores([*own, *box], dict.fromkeys(own, source) | box, given.device, given.chunk)
        if given.experts:
            return 0
        if given.shapes:
            points = "".join(f" tokens/s at batch {rows} | of bf16 |" for rows in given.rows)
            print(f"\n| model | scheme | weights, MB |{points}\n|---|---|---|{'---|---|' * len(given.rows)}")
        for shape in given.shapes:
            also = box if shape == "understudy" else {}
            own = [scheme for scheme in schemes if shape != "understudy" or scheme not in MADE_UP | FILES]
            places = {scheme: _model(shape, scheme, Path(directory)) for scheme in own}
            places |= {scheme: (str(path), "auto") for scheme, path in also.items()}
            _speed(shape, places, given)
    if given.caches:
        if not given.skip_accuracy:
            _cache_scores(given.caches, given.device)
        _cache_speed(given)
    return 0


def _written(layouts: list[str], directory: Path, source: Path) -> dict[str, Path]:
    """Write the checkpoints; those whose tools are missing are named and skipped."""
    box = {}
    for name in layouts:
        try:
            box[name] = write(name, directory / name, source)
        except MissingTool as error:
            print(f"{name} is skipped: {error}", flush=True)
    return box


def _scores(schemes: list[str], box: dict[str, Path], device: str, chunk: int) -> None:
    print("| scheme | perplexity | worse by | at most | capital questions right |\n|---|---|---|---|---|")
    base = 0.0
    for scheme in schemes:
        path = str(box[scheme])
        process = Process(what="accuracy", scheme=scheme, path=path, device=device, chunk=chunk)
        process.close()
        found = process.first
        base = base or found["perplexity"]
        worse = 100 * (found["perplexity"] / base - 1)
        limit = None if scheme == FLOATS or scheme not in {*ONLINE, *CHECKPOINTS} else limit_of(scheme)
        shown = "" if limit is None else f"{limit:g} %" if worse <= limit else f"{limit:g} %: missed"
        band = "" if limit is None else ", 6 to 8 bits" if limit == 1 else ", 4 and 5 bits"
        record(f"accuracy {scheme}", "perplexity", found["perplexity"])
        record(f"accuracy {scheme}", f"perplexity, worse by{band}", worse, "%")
        record(f"accuracy {scheme}", "capital questions right", found["right"], f"of {found['questions']}")
        questions = found["questions"]
        share = 100 * found["right"] / questions
        print(
            f"| {scheme} | {found['perplexity']:.4f} | {worse:+.2f} % | {shown} | {found['right']} of {questions} "
            f"({share:.1f} %) |",
            flush=True,
        )


def _cache_scores(caches: list[str], device: str) -> None:
    print("\n| cache | perplexity | worse by | capital questions right |\n|---|---|---|---|")
    base = 0.0
    for cache in ["", *caches]:
        process = Process(what="accuracy", scheme=FLOATS, path=str(MODEL_DIR), device=device, cache=cache)
        process.close()
        found = process.first
        base = base or found["perplexity"]
        share = 100 * found["right"] / found["questions"]
        print(
            f"| {cache or FLOATS} | {found['perplexity']:.4f} | {100 * (found['perplexity'] / base - 1):+.2f} % | "
            f"{found['right']} of {found['questions']} ({share:.1f} %) |",
            flush=True,
        )


def _cache_speed(given: argparse.Namespace) -> None:
    """Decodes of the included model, caches in turns."""
    points = [*((rows, 128) for rows in given.rows), (1, LONG)]
    heads = "".join(f" tokens/s at batch {rows}, {held} tokens | of bf16 |" for rows, held in points)
    print(f"\n| cache | bytes of a token |{heads}\n|---|---|{'---|---|' * len(points)}")
    names = ["", *given.caches]
    common = _common(given) | {"scheme": FLOATS, "path": str(MODEL_DIR), "load_format": "auto"}
    sides = [Process(cache=cache, context=LONG + 256, **common) for cache in names]
    rates: dict[tuple[int, int, int], list[float]] = {}
    for _ in range(given.rounds):
        for rows, held in points:
            for at, side in enumerate(sides):
                rates.setdefault((at, rows, held), []).append(side.decode(rows, held))
    for at, (cache, side) in enumerate(zip(names, sides, strict=True)):
        cells = ""
        for rows, held in points:
            pairs = zip(rates[at, rows, held], rates[0, rows, held], strict=True)
            against = statistics.median(mine / theirs for mine, theirs in pairs)
            cells += f" {statistics.median(rates[at, rows, held]):.0f} | {against:.2f} |"
        print(f"| {cache or FLOATS} | {side.first['token']:.0f} |{cells}", flush=True)
        side.close()


def _common(given: argparse.Namespace) -> dict[str, Any]:
    """The settings that all speed tasks of a run share."""
    names = "device", "steps", "threads", "clock"
    return {"what": "speed"} | {name: getattr(given, name) for name in names}


def _speed(shape: str, places: dict[str, tuple[str, str]], given: argparse.Namespace) -> None:
    """``places``: path and load format of each scheme."""
    schemes = list(places)
    sides = [
        Process(scheme=scheme, path=path, load_format=load_format, **_common(given))
        for scheme, (path, load_format) in places.items()
    ]
    rates: dict[tuple[int, int], list[float]] = {}
    for _ in range(given.rounds):
        for rows in given.rows:
            for at, side in enumerate(sides):
                rates.setdefault((at, rows), []).append(side.decode(rows))
    for at, (scheme, side) in enumerate(zip(schemes, sides, strict=True)):
        cells = ""
        for rows in given.rows:
            against = statistics.median(
                mine / theirs for mine, theirs in zip(rates[at, rows], rates[0, rows], strict=True)
            )
            cells += f" {statistics.median(rates[at, rows]):.0f} | {against:.2f} |"
            point = f"{'' if given.device == 'cpu' else given.device + ' '}{shape} {scheme}"
            record(point, f"tokens/s at batch {rows}", rates[at, rows])
            record(point, f"tokens/s at batch {rows}, of bf16", against)
        print(f"| {shape} | {scheme} | {side.first['bytes'] / 1e6:.1f} |{cells}", flush=True)
        side.close()


if __name__ == "__main__":
    main()
