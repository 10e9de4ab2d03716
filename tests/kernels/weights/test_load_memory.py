"""Loading takes the memory of the weights and of one tensor's working copies: no second copy of the weights exists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.kits.gguf_writer import write_gguf
from tests.kits.waiting import PATIENCE

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peaks are read from Linux's /proc")

HIDDEN, WIDE, LAYERS, VOCAB = 1024, 4096, 4, 512  # 124 MB of bfloat16, the largest fused tensor has 17 MB

LOADS = """
import gc, json, sys, threading
from kernels.contract.config import RunnerConfig
from kernels.execution.runner import ModelRunner


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


def load(path, quantization):
    gc.collect()
    base, peaks, loaded = anonymous(), [0], threading.Event()

    def watch():
        while not loaded.wait(0.001):
            peaks.append(anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    options = {"max_total_tokens": 64, "max_slots": 2, "max_step_tokens": 16, "threads": 1}
    config = RunnerConfig(path, dtype="bfloat16", quantization=quantization, **options)
    runner = ModelRunner(config)
    info = runner.load()
    loaded.set()
    watcher.join()
    return info.weight_bytes, anonymous() - base, max(peaks) - base


print(json.dumps([load(*each) for each in json.loads(sys.argv[1])]))
"""


def save(directory: Path, files: int) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    layer = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.v_proj": (HIDDEN // 4, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (WIDE, HIDDEN),
        "mlp.up_proj": (WIDE, HIDDEN),
        "mlp.down_proj": (HIDDEN, WIDE),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    shapes = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,), "lm_head": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{at}.{name}": shape for at in range(LAYERS) for name, shape in layer.items()}
    weights = [(f"{name}.weight", torch.full(shape, 0.01, dtype=torch.bfloat16)) for name, shape in shapes.items()]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    names = {}
    for number in range(files):
        file = "model.safetensors" if files == 1 else f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = dict(weights[number::files])
        save_file(part, directory / file)
        names |= dict.fromkeys(part, file)
    if files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return directory


def test_weights_are_loaded_without_a_second_copy(tmp_path):
    """In a process of its own, whose allocator returns what is freed: each load stays below the floats of a second
    copy, and keeps what the weights have."""
    one, three = save(tmp_path / "one", 1), save(tmp_path / "three", 3)
    gguf = write_gguf(one, tmp_path / "model.gguf", "Q8_0")
    loads = [(one, ""), (three, ""), (one, "int8"), (gguf, "")]
    done = subprocess.run(
        [sys.executable, "-c", LOADS, json.dumps([(str(path), quantization) for path, quantization in loads])],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert not done.returncode, done.stderr
    for (weights, kept, peak), (path, quantization) in zip(json.loads(done.stdout), loads, strict=True):
        case = f"{path.name} {quantization}: {weights} bytes of weights, {kept} kept, peak {peak}"
        working = 6 * 2 * WIDE * HIDDEN  # one fused tensor as it is read, in float32 and as it is kept
        assert 0.8 * weights < kept < weights + (16 << 20), case
        assert peak < weights + working, case
