"""What a type checker accepts and refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PREAMBLE = """
from actors.runtime import Actor, ActorRef, Message, handles

class Cache: ...
class Other: ...

class Match(Message[Cache, list[int]], frozen=True):
    token_ids: list[int]

class Drop(Message[Cache, None], frozen=True):
    page: int

class Foreign(Message[Other, int], frozen=True): ...
"""

GOOD = """
class CacheActor(Actor[Cache]):
    @handles(Match)
    async def match(self, message: Match) -> list[int]:
        return message.token_ids

    @handles
    def drop(self, message: Drop) -> None: ...

async def use(ref: ActorRef[Cache]) -> int:
    prefix = await ref.ask(Match([1]), timeout=1.0)
    prefix.append(1)
    maybe: list[int] | None = await ref.ask(Match([1]), timeout=1.0)
    await ref.tell(Drop(1))
    await ref.ask(Drop(1), timeout=1.0)
    ref.offer(Drop(1))
    return len(prefix) + len(maybe or [])
"""

BAD = """
class CacheActor(Actor[Cache]):
    @handles(Match)
    async def match(self, message: Match) -> list[str]:  # wrong: the reply of the message is list[int]
        return []

    @handles(Match)
    def match_too(self, message: Match) -> str:  # wrong: so is this one's
        return ""

async def use(ref: ActorRef[Cache]) -> None:
    await ref.ask(Foreign(), timeout=1.0)  # wrong: another protocol
    ref.offer(Match([1]))  # wrong: must be asked
    await ref.tell(Match([1]))  # wrong: must be asked
    text: str = await ref.ask(Match([1]), timeout=1.0)  # wrong: not the reply
    (await ref.ask(Match([1]), timeout=1.0)).upper()  # wrong: not the reply
    await ref.ask(Match([1]))  # wrong: no timeout
"""


def mypy(path: Path) -> tuple[int, str]:
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), str(path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        check=False,
    )
    return found.returncode, found.stdout


def test_mypy_accepts_the_good_and_refuses_each_line_of_the_bad(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    good, bad = tmp_path / "good_example.py", tmp_path / "bad_example.py"
    good.write_text(PREAMBLE + GOOD)
    bad.write_text(PREAMBLE + BAD)
    status, output = mypy(good)
    assert status == 0, output
    status, output = mypy(bad)
    assert status == 1, output
    lines = (PREAMBLE + BAD).splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    reported = {int(line.split(":")[1]) for line in output.splitlines() if ": error:" in line}
    # An error of a decorated method is reported at its decorator.
    assert {number + 1 if lines[number - 1].strip().startswith("@") else number for number in reported} == wrong, output
