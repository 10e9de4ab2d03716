"""The source of the tries in C++. Imports nothing that a build of a wheel lacks."""

from __future__ import annotations

import platform
from pathlib import Path

from kernels.devices.cpu.native.library import Source

__all__ = ["FLAGS", "SOURCE"]

FLAGS = ("-O3", "-std=c++20", "-shared", "-fPIC", "-ffp-contract=off")
# By type of processor, since the cache may be shared.
SOURCE = Source(Path(__file__).parent / "native" / "trie.cpp", FLAGS, f"tries-{platform.machine()}")
