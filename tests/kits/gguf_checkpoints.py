"""GGUF checkpoints as floats, and the greedy tokens of their models."""

from __future__ import annotations

import shutil

from safetensors.torch import save_file

from tests.kits.declared import declared, open_gguf

__all__ = [
    "floats",
    "greedy",
]


def floats(source, target, file):
    """The directory ``source`` with the weights of a GGUF file of it."""
    shutil.copytree(source, target)
    checkpoint = open_gguf(file)
    save_file({name: checkpoint.floats(name) for name in declared(file)}, target / "model.safetensors")
    return target


def greedy(drive, path, prompt, length=24, **options):
    driver = drive(path, dtype="float32", **options)
    driver.admit(1, prompt)
    return driver.generate(1, length)
