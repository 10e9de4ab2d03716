"""The engine inside other programs: a service with its own `app` package, a loop in another thread, uvloop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import uvloop

from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams
from tests.kits.waiting import PATIENCE

PROGRAM = """
import asyncio, logging, os, signal, sys
import app                                   # the service's own package, not Troupe's
assert app.NAME == "mine", app.__file__
from actors.engine.engine import Engine
from actors.protocol.requests import SamplingParams

async def main():
    handlers = list(logging.getLogger().handlers)
    async with Engine(model=sys.argv[1], dtype="float32", cpu_threads=1, max_total_tokens=1024) as engine:
        text = ""
        async for delta in engine.generate("Once", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)):
            text += delta.text
            tokens = delta.usage.completion_tokens
        assert tokens == 8
    assert logging.getLogger().handlers == handlers
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    heavy = {"torch", "transformers", "quart", "hypercorn"} & set(sys.modules)
    assert not heavy, heavy
    print("served by", app.NAME)

asyncio.run(main())                          # no `if __name__ == "__main__"`: workers do not import this program
"""


def test_a_service_with_its_own_app_package(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").write_text('NAME = "mine"\n')
    (tmp_path / "service.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "service.py", str(tiny_model)], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served by mine\n"


def test_in_a_loop_of_another_thread_and_on_uvloop(tiny_model: Path) -> None:
    counts: list[int] = []

    async def generate() -> None:
        async with Engine(model=str(tiny_model), dtype="float32", cpu_threads=1, max_total_tokens=1024) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            async for delta in engine.generate("Once", params):
                tokens = delta.usage.completion_tokens
            counts.append(tokens)

    thread = threading.Thread(target=lambda: asyncio.run(generate()))
    thread.start()
    thread.join(PATIENCE)
    uvloop.run(generate())
    assert counts == [8, 8]
