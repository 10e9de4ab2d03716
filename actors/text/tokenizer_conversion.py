"""Converts a tokenizer with transformers in a separate process.

transformers imports torch, and torch every installed backend: torch_npu fails without CANN. transformers also imports
Hugging Face's package ``kernels`` if it is installed, and would find the one of this project. The process hides both,
and its end frees their memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from kernels.contract.environment import NO_AUTOLOAD

__all__ = ["ConversionError", "convert_tokenizer"]

_PROGRAM = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
sys.modules["torch_npu"] = sys.modules["kernels"] = None
answer = os.dup(1)
os.dup2(2, 1)  # output of libraries must not mix with the reply
try:
    from transformers import AutoTokenizer
    made = AutoTokenizer.from_pretrained(sys.argv[2], trust_remote_code=sys.argv[3] == "trusted")
    backend = getattr(made, "backend_tokenizer", None)
    said = {"tokenizer": backend.to_str() if hasattr(backend, "to_str") else None}
except Exception as error:
    said = {"error": f"{type(error).__name__}: {error}"}
with os.fdopen(answer, "w", encoding="utf-8") as out:
    json.dump(said, out)
"""


class ConversionError(ValueError):
    """transformers cannot build a tokenizer from these files."""


def convert_tokenizer(path: Path, trusted: bool = False) -> Tokenizer | None:
    """The tokenizer that transformers builds from the directory ``path``; None if it has no fast form. ``trusted``:
    whether Python files of the directory may run, in the process that converts. Raises ConversionError.
    """
    search = json.dumps([os.path.abspath(entry) for entry in sys.path])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, search, str(path), "trusted" if trusted else ""],
        env=os.environ | NO_AUTOLOAD,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConversionError(f"the converting process ended with status {done.returncode}: {last}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise ConversionError(reply["error"])
    return None if reply["tokenizer"] is None else Tokenizer.from_str(reply["tokenizer"])
