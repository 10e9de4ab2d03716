"""llama.cpp for comparison: its server on one GGUF file, and its quantizer, found on the PATH."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from app.understudy import MODEL_DIR
from tests.kits.gguf_writer import write_gguf

__all__ = ["QUANTIZE", "SERVER", "MissingTool", "serve", "write_as"]

SERVER, QUANTIZE = shutil.which("llama-server"), shutil.which("llama-quantize")


class MissingTool(RuntimeError):
    """A program or library of llama.cpp is needed and not found."""


PATIENCE = 240
"""Seconds until a server must be ready."""


def write_as(kind: str, directory: Path) -> Path:
    """The included model as a file of ``kind``: of one type by the gguf package, of a mixture by llama-quantize.

    Raises MissingTool.
    """
    made = directory / f"box.{kind}.gguf"
    if not kind.startswith("I") and "_K" not in kind:
        return write_gguf(MODEL_DIR, made, kind)
    if QUANTIZE is None:
        raise MissingTool(f"llama-quantize makes files of {kind}; put llama.cpp's on the PATH")
    whole = directory / "box.gguf"
    if not whole.is_file():
        write_gguf(MODEL_DIR, whole)
    subprocess.run([QUANTIZE, whole, made, kind, "1"], check=True, capture_output=True)
    return made


@contextmanager
def serve(file: Path) -> Iterator[httpx.Client]:
    """A client of a server of ``file`` on one thread, whose cache is in float32."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(SERVER), "-m", str(file), "--port", str(port), "-c", "1024", "-t", "1", "-np", "1"]
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE, trust_env=False) as client:
            deadline = time.monotonic() + PATIENCE
            while not _ready(client):
                assert server.poll() is None, "llama-server ended"
                assert time.monotonic() < deadline
                time.sleep(0.1)
            yield client
    finally:
        server.kill()
        server.wait()


def _ready(client: httpx.Client) -> bool:
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
