"""GGUF types that the gguf package cannot write, through llama.cpp's own quantizer in libggml-base. The library
is found as other shared libraries are (``LD_LIBRARY_PATH``) and built in seconds (``cmake --build … -t ggml-base``)."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from app.understudy import MODEL_DIR
from tests.kits.declared import declared
from tests.kits.gguf_writer import write_gguf
from tests.kits.llama_server import MissingTool

__all__ = ["need_library", "write_by_ggml"]

LIBRARY = "libggml-base.so"
TABLE, REST = "Q6_K", "IQ4_NL"
"""The types of the table of tokens, and, as in llama.cpp, of rows that are no whole number of blocks."""


def need_library() -> None:
    """Load llama.cpp's library. Raises MissingTool where that fails."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise MissingTool(
            f"{LIBRARY} of llama.cpp makes I-quants; put its folder into LD_LIBRARY_PATH ({error})"
        ) from None


def write_by_ggml(kind: str, file: Path, importance: Mapping[str, Any]) -> Path:
    """Write the included model to ``file`` with projections of type ``kind``.

    ``importance``: the mean square of each input of a module, f32 [inputs].
    """
    layers = json.loads((MODEL_DIR / "config.json").read_text())["num_hidden_layers"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, layers)
    replaced, specs = {}, declared(MODEL_DIR)
    for name, tensor in load_file(MODEL_DIR / "model.safetensors").items():
        table = name == "model.embed_tokens.weight"
        if not table and not specs[name].quantizable:
            continue
        module = name.removesuffix(".weight")
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        chosen = gguf.GGMLQuantizationType[TABLE if table else kind if tensor.shape[1] % block == 0 else REST]
        weights = None if table else np.ascontiguousarray(importance[module], np.float32)
        own = names.get_name(name, try_suffixes=(".weight",))
        replaced[own] = _quantized(tensor.float().numpy(), chosen, weights), chosen
    return write_gguf(MODEL_DIR, file, replaced=replaced)


def _quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType, weights: np.ndarray | None) -> np.ndarray:
    """Quantize ``values`` f32 [rows, inputs] to uint8 [rows, bytes of a row]."""
    library = ctypes.CDLL(LIBRARY)
    quantize = library.ggml_quantize_chunk
    pointer = ctypes.c_void_p
    quantize.argtypes = [ctypes.c_int, pointer, pointer, *[ctypes.c_int64] * 3, pointer]
    quantize.restype = ctypes.c_size_t
    values = np.ascontiguousarray(values, np.float32)
    rows, inputs = values.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    found = np.empty((rows, inputs // block * size), np.uint8)
    held = None if weights is None else weights.ctypes.data
    written = quantize(int(kind), values.ctypes.data, found.ctypes.data, 0, rows, inputs, held)
    assert written == found.nbytes, f"{kind.name}: {written} bytes of {found.nbytes}"
    return found
