"""FR-Spec's token maps: the target's most frequent tokens, to which the draft's head is reduced.

A head over a quarter of the vocabulary costs a quarter, and misses few of the tokens worth drafting (Zhao et al., arXiv
2502.14856). A map is a list of token ids, in any order: a JSON list, a safetensors file with one tensor, or a list or a
tensor that torch.save has written (.pt), the form in which FR-Spec's authors publish them.

A .pt file is a pickle, which may run code when it is read. It is therefore read with ``weights_only``, in a separate
process that has limits on time and memory and cannot write files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kernels.contract.errors import LoadError
from kernels.models.config import ModelConfig
from kernels.models.decoder import Decoder
from kernels.models.registry import tensors
from kernels.speculation.drafter import DrafterContext
from kernels.weights.loading import CheckpointFiles, Placement, open_weights
from kernels.weights.tensors import Role

__all__ = ["head_rows", "read_token_map"]

_MAX_BYTES = 64 << 20  # of a .pt file: eight million tokens
_READER_BYTES = 2 << 30  # most memory for reading one
_READER_SECONDS = 120.0


def read_token_map(path: str | Path, vocab_size: int) -> Tensor:
    """The target's id of each token of the draft's head, int64 [tokens]. Raises LoadError."""
    path = Path(path)
    if not path.is_file():
        raise LoadError(f"the token map {path} does not exist; give a file of token ids to --speculative-token-map")
    result = _read(path)
    try:
        ids = torch.as_tensor(result)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoadError(f"the token map {path} must be a list of token ids: {error}") from error
    if ids.ndim != 1 or not len(ids) or ids.dtype.is_floating_point or ids.dtype in (torch.bool, torch.complex64):
        raise LoadError(
            f"the token map {path} must be a list of token ids, and is {ids.dtype} of shape {list(ids.shape)}"
        )
    ids = ids.to(torch.int64)
    minimum, maximum = int(ids.min()), int(ids.max())
    if minimum < 0 or maximum >= vocab_size:
        raise LoadError(
            f"the token map {path} has ids from {minimum} to {maximum}; the model has 0 to {vocab_size - 1}: is it the "
            "map of another model?"
        )
    if len(set(ids.tolist())) < len(ids):
        raise LoadError(f"the token map {path} contains a token twice; create it again")
    return ids


def _read(path: Path) -> Any:
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                names = list(file.keys())
                if len(names) != 1:
                    raise LoadError(f"the token map {path} must have one tensor, and has {len(names)}")
                return file.get_tensor(names[0])
    except LoadError:
        raise
    except Exception as error:  # the file may contain anything
        reason = (str(error).splitlines() or [repr(error)])[0]
        raise LoadError(f"the token map {path} cannot be read ({reason}); make it a JSON list of ids") from error
    if path.suffix in (".pt", ".pth"):
        return _unpickle(path)
    raise LoadError(f"the token map {path} must be a .json, .safetensors or .pt file")


_READER = """
import json, os, resource, sys
out = os.dup(1)
os.dup2(2, 1)  # other output must not mix with the reply
import torch
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
if room:
    resource.setrlimit(resource.RLIMIT_AS, (room + {memory}, room + {memory}))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
found = torch.load(sys.stdin.buffer, weights_only=True, map_location="cpu")
found = found.tolist() if isinstance(found, torch.Tensor) else list(found)
with os.fdopen(out, "w") as file:
    json.dump(found, file)
"""


def _unpickle(path: Path) -> Any:
    """Content of a .pt file as JSON values. Raises LoadError."""
    if path.stat().st_size > _MAX_BYTES:
        raise LoadError(
            f"the token map {path} has more than {_MAX_BYTES >> 20} MiB, which is too large for a list of tokens"
        )
    try:
        with path.open("rb") as file:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _READER.format(memory=_READER_BYTES)],
                stdin=file,
                capture_output=True,
                timeout=_READER_SECONDS,
                env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
                | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"},
                check=True,
            )
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        reason = f"reading it took more than {_READER_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = next(
            (line for line in reversed(lines) if "Error" in line), f"its reader ended with {error.returncode}"
        )
    except (OSError, ValueError) as error:
        reason = str(error)
    raise LoadError(
        f"the token map {path} cannot be read as a list or a tensor of token ids that torch.save has written "
        f"({reason[:200]}); make it a JSON list of ids"
    )


def head_rows(
    context: DrafterContext, path: str, load_format: str, whole: ModelConfig, model: Decoder, ids: Tensor
) -> Tensor:
    """The head of a model for the tokens ``ids`` alone: [tokens, hidden], whole on every rank.

    ``path``, ``load_format``: of its checkpoint. ``whole``: its sizes. ``model``: this rank's part of it.
    """
    rows = ids.to(context.device.torch_device)
    if whole.tied_embeddings and context.group.size == 1:
        return model.embeddings.plain.lookup(rows)
    role = Role.EMBEDDING if whole.tied_embeddings else Role.OUTPUT
    spec = next(spec for spec in tensors(whole).values() if spec.role is role)
    files = CheckpointFiles(path, load_format, context.config.random_seed)
    weights = open_weights(files, {spec.name: spec}, Placement(context.dtype, context.device.torch_device))
    return weights.take([spec.name]).index_select(0, rows)
