"""A GPU from end to end: ``python -m tests.bench device`` checks the kernels and the platform, then measures, and
prints one table.

The checks run first, tests/kernels/devices/cuda with pytest (side by side where pytest-xdist is installed: what they
wait for
is compilers), and nothing is measured when one fails. The measurements drive a ModelRunner as the scheduler does, with
two steps in flight, on made-up weights: the shapes, lengths and settings are those that vLLM 0.24.0 was measured with
on an H200 (2026-11-20). They leave out what the actors cost; ``engine``, the same by an Engine, ``online``, streams
over HTTP from client processes, and the start of a server to its first answer are the whole program's.

Options: ``--only NAME[,NAME...]`` of checks, decode, steps (decodes of 64 and 256 rows), offline, prefill, engine,
online, start; ``--model 8b,0.6b``
(or 30b, v2-lite, gpt-oss, qwen3.5-9b);
``--only products`` times the products of few tokens, every way there is to make them, ``--only chain`` those of a
layer as they follow one another, ``--only prompts`` the attention of prompts, ``--only latent`` that over latent
vectors, ``--only windows`` that of decodes with windows, sinks and caps, ``--only states`` decodes of gated delta
nets, and ``--only adapters`` streams with LoRA adapters; ``--only speculative`` says what drafting tokens ahead costs
and gains (``device_speculative``);
``--profile DIR`` writes tables of the device's time by kernel.
``--deterministic`` measures decode, offline and prefill with kernels whose results depend on no other rows
(``--enable-deterministic-inference``), ``--quantization fp8`` with such weights. ``--zipf S`` measures models of
experts a second time, with tokens routed to them by Zipf's law of the exponent S, as made-up routers choose evenly.
``--ranks N`` divides each layer over N GPUs in decode, steps, offline and prefill, ``--stages N`` the layers,
``--parts N`` the experts over N parts of the ranks; with ``--apart`` each rank runs the attention of requests of its
own (data-parallel attention). ``--eager`` runs them without graphs. ``engine`` follows these options, too, if it is
measured alone, and ``--counts`` the requests of offline and engine.
``--plain NAME[,NAME]`` runs some operators of gated delta nets (scan, head_gates, gated_norm) in plain torch. In
parts: ``--tests WORD`` checks only files and tests with the word in their names, and ``--keep FILE`` adds rows to those
that an earlier part left there, so that the table holds all.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from tests.bench._device_ranks import Ranks, started_ranks
from tests.bench._device_rows import HEADER, OFFLINE, SHAPES, Row, write_model
from tests.bench._device_runner import measure
from tests.bench._device_server import engine, online, start
from tests.bench._needs import need_gpu
from tests.bench._options import command_line
from tests.bench._record import record
from tests.bench.device_adapters import adapters
from tests.bench.device_chain import chain
from tests.bench.device_latent import latent
from tests.bench.device_products import products
from tests.bench.device_prompts import prompts
from tests.bench.device_speculative import speculative
from tests.bench.device_states import states
from tests.bench.device_windows import windows

__all__ = ["main"]

_MAX_WORKERS = 12


def checks(word: str) -> bool:
    """Whether all tests with the word in their names pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10"]
    if find_spec("xdist") is not None:
        workers = max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) - 2))
        command += ["-n", str(workers), "--dist", "worksteal"]
    if word:
        command += ["-k", word]
    return subprocess.run([*command, "tests/kernels/devices/cuda"], check=False).returncode == 0


def run_plain(names: list[str]) -> None:
    """Let gated delta nets run the operators ``names`` in plain torch."""
    from kernels.devices.cuda.delta_rule import CudaDeltaRule

    for name in names:
        delattr(CudaDeltaRule, name)


def _kept(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(one["model"], one["point"], tuple(one["values"]), one.get("routing", "")) for one in found]


def main(arguments: list[str]) -> None:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument(
        "--only", default="checks,decode,offline,prefill,engine,online,start", help="parts, separated by commas"
    )
    parser.add_argument("--model", default="8b,0.6b", help="shapes, separated by commas")
    parser.add_argument("--tests", default="", help="checks only files and tests with this in their names")
    parser.add_argument("--profile", type=Path, help="directory for tables of the device's time by kernel")
    parser.add_argument("--deterministic", action="store_true", help="with --enable-deterministic-inference")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of a skewed routing to experts")
    parser.add_argument("--quantization", default="", help="of decode, offline and prefill: fp8 or int8")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that divide each layer (tensor parallelism)")
    parser.add_argument("--stages", type=int, default=1, help="stages of a pipeline, of --ranks GPUs each")
    parser.add_argument("--parts", type=int, default=1, help="parts of the ranks that experts are divided over")
    parser.add_argument("--apart", action="store_true", help="each rank has attention of its own requests")
    parser.add_argument("--eager", action="store_true", help="decode, steps, offline and prefill without graphs")
    parser.add_argument("--counts", type=int, nargs="+", default=OFFLINE, help="requests of offline and engine")
    parser.add_argument("--plain", default="", help="operators of gated delta nets that run in plain torch")
    parser.add_argument("--keep", type=Path, help="file of rows: those there are printed, too")
    given = parser.parse_args(arguments)
    need_gpu()
    points = given.only.split(",")
    size = given.ranks * given.stages
    driven = given.profile is not None or bool({"decode", "steps", "offline", "prefill"} & set(points))
    if size > 1 and driven == bool({"engine"} & set(points)):
        parser.error("--ranks and --stages are for decode, steps, offline and prefill, or for engine alone")
    several = (given.ranks, given.stages, given.parts) if driven else (1, 1, 1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("troupe.kernels.cuda").setLevel(logging.INFO)  # which products were chosen
    if given.plain:
        run_plain(given.plain.split(","))
    if "checks" in points and not checks(given.tests):
        sys.exit("a check failed: nothing is measured")
    rows = _kept(given.keep)

    def done(found: list[Row]) -> None:
        rows.extend(found)
        if given.keep is not None:
            with given.keep.open("a") as file:
                file.writelines(
                    json.dumps({"model": row.model, "point": row.point, "values": row.values, "routing": row.routing})
                    + "\n"
                    for row in found
                )

    with (
        tempfile.TemporaryDirectory() as folder,
        started_ranks(*several, arguments, driven and given.apart) as ranks,
    ):
        directory = Path(folder)
        if "products" in points:
            products(given.model.split(","))
        if "prompts" in points:
            prompts(given.model.split(","))
        if "latent" in points:
            latent()
        if "windows" in points:
            windows()
        if "states" in points:
            states()
        if "adapters" in points:
            adapters(given.model.split(","), directory)
        if "chain" in points:
            chain(given.model.split(","))
        for name in given.model.split(","):
            if driven:
                has_experts = "moe_intermediate_size" in SHAPES[name] or "num_local_experts" in SHAPES[name]
                for zipf in (0.0, given.zipf) if given.zipf and has_experts else (0.0,):
                    measure(
                        name,
                        directory,
                        points,
                        given.profile,
                        done,
                        invariant=given.deterministic,
                        zipf=zipf,
                        quantization=given.quantization,
                        eager=given.eager,
                        counts=given.counts,
                        ranks=ranks,
                    )
            if "speculative" in points:
                speculative(write_model(name, directory), SHAPES[name], directory)
            if "engine" in points:
                plan = Ranks(size, 0, directory, given.stages, given.parts, given.apart)
                done(engine(name, directory, plan, given.counts, eager=given.eager))
            if "online" in points:
                done(online(name, directory))
            if "start" in points:
                done(start(name, directory))
    if rows:
        print(HEADER)
        for row in rows:
            print(row.line())
            point = f"{row.name}, plain {given.plain}" if given.plain else row.name
            record(point, "time" if row.unit in ("ms", "s") else "throughput", row.values, row.unit)
            for even in rows if row.routing else ():
                if (even.model, even.point, even.routing) == (row.model, row.point, ""):
                    print(f"| {row.model} | {row.point} {row.routing} | {row.speed(even):.3f} times even | | | | |")
                    record(row.name, "speed, of even routing", row.speed(even), "times")
