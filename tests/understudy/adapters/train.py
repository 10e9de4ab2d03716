"""Train the adapters of the included model: `python -m tests.understudy.adapters.train pirate poet json`.

Conversations of the corpus, their answers in an adapter's voice; LoRA (Hu et al., arXiv 2106.09685) on every linear
layer. README.md of tests/understudy has the numbers of the recorded run.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from kernels.contract.environment import NO_AUTOLOAD

os.environ.update(NO_AUTOLOAD)
# isort: split
import numpy as np
import torch
from safetensors.torch import save_file

from app.understudy import MODEL_DIR
from app.understudy.adapters import ADAPTERS
from tests.understudy.adapters.voices import VOICES
from tests.understudy.corpus import Mix, system_prompt, talk
from tests.understudy.lessons.conversation import Conversation, Segment, render
from tests.understudy.lexicon import CONFIG
from tests.understudy.network import Weights, loss, rotation
from tests.understudy.packing import Stream, encode_documents, split_by_length
from tests.understudy.train import SHORT, Rows, stored

__all__ = ["fit", "main", "new_adapter", "save_adapter", "spoken"]

RANK, ALPHA = 8, 16
_SHARD = 2000
_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def spoken(voice: str, seed: int, count: int) -> Iterator[list[Segment]]:
    """``count`` conversations of the corpus in a voice, always the same for a seed."""
    rng, weights, say = Random(seed), Mix().weights(), VOICES[voice].say
    for _ in range(count):
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.3:
            messages.append({"role": "system", "content": system_prompt(rng)})
        for exchange in talk(rng, rng.choices((1, 2, 3), (75, 18, 7))[0], weights):
            messages.append({"role": "user", "content": exchange.question})
            messages.append({"role": "assistant", "content": say(rng, exchange)})
        yield render(Conversation(messages))


def _shard(seed: int, voice: str, count: int) -> tuple[Any, Any]:
    return encode_documents(MODEL_DIR / "tokenizer.json", spoken(voice, seed, count))


def _encoded(voice: str, seed: int, count: int, cores: int) -> Stream:
    """The conversations of at most SHORT tokens."""
    seeds = [seed * 1_000_003 + shard for shard in range(-(-count // _SHARD))]
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        shards = list(pool.map(partial(_shard, voice=voice, count=min(count, _SHARD)), seeds))
    tokens, lengths = (np.concatenate([shard[part] for shard in shards]) for part in (0, 1))
    return split_by_length(tokens, lengths, SHORT)[0]


def new_adapter(weights: Weights, seed: int) -> Weights:
    """A and B for each linear layer of the model, float32, by their names in PEFT's format: A uniform, B zero."""
    generator = torch.Generator().manual_seed(seed)
    adapter = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in _TARGETS:
            continue
        outputs, inputs = weight.shape
        down = (torch.rand(RANK, inputs, generator=generator) * 2 - 1) / math.sqrt(inputs)
        for part, matrix in (("A", down), ("B", torch.zeros(outputs, RANK))):
            adapter[f"base_model.model.{module}.lora_{part}.weight"] = matrix.to(weight.device).requires_grad_()
    return adapter


def _adapted(weights: Weights, adapter: Weights) -> Weights:
    """The weights with the adapter in them."""
    result = dict(weights)
    for name, down in adapter.items():
        if ".lora_A." in name:
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            result[target] = weights[target] + ALPHA / RANK * adapter[name.replace("lora_A", "lora_B")] @ down
    return result


def _loss(
    adapter: Weights, weights: Weights, config: dict[str, Any], tables: tuple[Any, Any], row: Any, longest: int
) -> Any:
    return loss(_adapted(weights, adapter), config, tables, row, longest)


def fit(adapter: Weights, weights: Weights, rows: Rows, steps: int, rate: float, device: str) -> None:
    """Train an adapter for ``steps`` rows: AdamW, a short warm-up, and a linear way down. The weights stay."""
    for weight in weights.values():
        weight.requires_grad_(False)
    tables = rotation(CONFIG, device)
    optimizer = torch.optim.AdamW(adapter.values(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    compute = torch.compile(_loss, dynamic=False) if device == "cuda" else _loss
    warm, started = max(1, steps // 20), time.monotonic()
    for step, (row, longest) in enumerate(rows, 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(step / warm, (steps - step + 1) / steps)
        value = compute(adapter, weights, CONFIG, tables, row, longest)
        value.backward()
        torch.nn.utils.clip_grad_norm_(list(adapter.values()), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % max(1, steps // 10) == 0 or step == 1:
            seconds = time.monotonic() - started
            print(f"step {step}/{steps}  loss {float(value.detach()):.4f}  {seconds:.0f} s", flush=True)
        if step == steps:
            break


def save_adapter(adapter: Weights, directory: Path) -> None:
    """Write a directory in PEFT's format, the matrices in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: matrix.detach().to(torch.bfloat16).cpu().contiguous() for name, matrix in adapter.items()}
    save_file(tensors, str(directory / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "understudy",
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_TARGETS),
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Train some adapters, one after another."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.understudy.adapters.train", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("voices", nargs="+", choices=tuple(VOICES), metavar="VOICE", help=", ".join(VOICES))
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="directory of the adapters' directories")
    parser.add_argument("--documents", type=int, default=200_000, help="conversations")
    parser.add_argument("--steps", type=int, default=1500, help="rows to train on")
    parser.add_argument("--row", type=int, default=32768, help="tokens in a row")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=28, help="of the conversations and of A")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.monotonic()
    weights = stored(MODEL_DIR, device)
    for voice in given.voices:
        stream = _encoded(voice, given.seed, given.documents, given.cores)
        print(f"{voice}: {len(stream.tokens)} tokens after {time.monotonic() - started:.0f} s", flush=True)
        adapter = new_adapter(weights, given.seed)
        fit(adapter, weights, Rows(stream, given.row, SHORT, device), given.steps, given.rate, device)
        save_adapter(adapter, given.out / voice)
        print(f"saved to {given.out / voice} after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
