"""Prefill of sparse attention on several ranks, with and without --enable-nsa-prefill-context-parallel.

    python -m tests.bench context_parallel [--tokens 8192] [--ranks 2]

Each rank is a process with one thread. The model has DeepSeek V3.2's layers in an eighth of its heads, with made-up
weights; the prompt runs in chunks. Decodes are of one row, behind the prompt.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.bench._options import command_line
from tests.bench._record import record

__all__ = ["main"]

_MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 65536,
}
_DECODES = 16


def main(argv: list[str] | None = None) -> int:
    parser = command_line(__name__, __doc__, records=True)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192], help="of the prompt")
    parser.add_argument("--ranks", type=int, default=2, help="processes that divide the model")
    parser.add_argument("--chosen", type=int, default=512, help="tokens that a query attends to")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of the prompt in a step")
    parser.add_argument("--rounds", type=int, default=1, help="measurements; all count")
    options = parser.parse_args(argv)
    print(f"{'tokens':>8}{'divided by':>12}{'prefill s':>12}{'decode ms':>12}")
    for tokens in options.tokens:
        for name, divided in (("heads", False), ("tokens", True)):
            prefill, decode = _measure(tokens, options.ranks, divided, (options.chosen, options.chunk, options.rounds))
            point = f"{tokens} tokens, {options.ranks} ranks, divided by {name}"
            record(point, "prefill", prefill, "s")
            record(point, "decode", decode, "ms")
            print(f"{tokens:>8}{name:>12}{min(prefill):>12.2f}{min(decode):>12.2f}", flush=True)
    return 0


def _measure(tokens: int, ranks: int, divided: bool, sizes: tuple[int, int, int]) -> tuple[list[float], list[float]]:
    """Seconds of prefills and milliseconds of decodes, of each round."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        chosen, chunk, _ = sizes
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL | {"index_topk": chosen}))
        config: dict[str, Any] = {
            "model_path": folder,
            "dtype": "float32",
            "load_format": "dummy",
            "max_slots": 3,
            "max_total_tokens": tokens + 1024,
            "max_step_tokens": chunk,
            "threads": 1,
            "tp_size": ranks,
            "rendezvous": f"{folder}/store" if ranks > 1 else "",
            "context_parallel": divided and ranks > 1,
        }
        here, there = spawn.Pipe()
        processes = [
            spawn.Process(target=_rank, args=(rank, config, tokens, sizes, None if rank else there), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        there.close()
        try:
            return here.recv()  # type: ignore[no-any-return]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(
    rank: int, config: dict[str, Any], tokens: int, sizes: tuple[int, int, int], answer: Connection | None
) -> None:
    from kernels.contract.config import RunnerConfig
    from kernels.execution.runner import ModelRunner
    from tests.kits.driver import Driver

    _, chunk, rounds = sizes
    runner = ModelRunner(RunnerConfig(**config, tp_rank=rank))
    driver = Driver(runner, runner.load())
    draws, prefills, decodes = random.Random(1), [], []
    for _ in range(rounds):
        driver.admit(1, [draws.randrange(4096) for _ in range(tokens)])
        begin = time.perf_counter()
        for first in range(0, tokens, chunk):
            driver.step([(1, min(chunk, tokens - first))])
        prefills.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        for _ in range(_DECODES):
            driver.step([(1, 1)])
        decodes.append((time.perf_counter() - begin) * 1e3 / _DECODES)
        driver.release(1)
    if answer is not None:
        answer.send((prefills, decodes))


if __name__ == "__main__":
    raise SystemExit(main())
